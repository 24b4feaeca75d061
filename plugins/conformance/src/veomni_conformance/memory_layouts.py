"""Checks that strides and addresses of inputs and incoming gradients make no difference.

Inputs may be slices of packed projections, transposed heads, shards of a flat buffer (FSDP1) or expanded biases.
Incoming gradients may be the expanded scalar of a sum, transposed, or a slice of a larger tensor, and in another layout
in each call.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from veomni_conformance.sample_changes import is_a_choice
from veomni_conformance.sample_tensors import map_tensors, to_float64, upstream_of
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Outcome, Position, Subject
from veomni_conformance.tensor_layouts import LAYOUTS, LAYOUTS_OF_GRADIENTS, Layout
from veomni_ops.contract import Sample

_VANISHED = 1e-3  # share of its usual norm below which a gradient is mostly rounding


def check_memory_layouts(subject: Subject, position: Position, repeated: bool = True) -> Iterator[str]:
    """Run with inputs and incoming gradients in each layout: all inputs alike, and each input in another layout.

    Without ``repeated``, not with equal rows, of which thousands make sums round past the tolerances.
    """
    layouts = list(LAYOUTS.items())
    yield from first_of(
        sentence
        for turn, (name, layout) in enumerate(layouts)
        for words, chosen in (
            (f"with its inputs {name}", [layout]),
            (f"with its first input {name}, and each of the others in another way", _rotated(layouts, turn)),
        )
        for sentence in reveal(words, lambda c=chosen: _laid_out(subject, position, c))  # type: ignore[misc]
    )
    if repeated:
        yield from reveal(
            "with inputs that repeat one row by a stride of zero",
            lambda: _expanded(subject, position),
            without=("with inputs of equal rows", lambda: _expanded(subject, position, Tensor.contiguous)),
        )
    if not subject.spec.backward:
        return
    yield from first_of(
        sentence
        for name, layout in LAYOUTS_OF_GRADIENTS.items()
        for sentence in reveal(
            f"with an incoming gradient {name.replace('their', 'its')}",
            lambda x=layout: _upstream_laid_out(subject, position, x),  # type: ignore[misc]
        )
    )
    yield from reveal("with the incoming gradient of a sum, which is expanded", lambda: _summed(subject, position))


def _rotated(layouts: list[tuple[str, Layout]], turn: int) -> list[Layout]:
    return [layouts[(turn + step) % len(layouts)][1] for step in range(len(layouts))]


def _laid_out(subject: Subject, position: Position, layouts: list[Layout]) -> str | None:
    count = 0

    def lay_out(tensor: Tensor) -> Tensor:
        nonlocal count
        layout, count = layouts[count % len(layouts)], count + 1
        return _leaf(layout(tensor.detach()) if tensor.dim() else tensor, tensor.requires_grad)

    sample = map_tensors(subject.draw(position), lay_out)
    return subject.problem(subject.outcome(sample), subject.exact(position))


def _expanded(subject: Subject, position: Position, laid_out: Layout = lambda tensor: tensor) -> str | None:
    def expand(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dim() < 2 or tensor.shape[0] < 2:
            return tensor
        return _leaf(laid_out(tensor.detach()[:1].expand(tensor.shape)), tensor.requires_grad)

    def sample() -> Sample:
        return map_tensors(subject.draw(position), expand)

    usual, exact = subject.exact(position), subject.reference(to_float64(sample()))
    # With equal rows a gradient may cancel to rounding noise (an output projection's does). Those are not compared.
    asked = [name for name in exact.gradients if not _vanishes(exact, usual, name)]
    # Repeated rows can make scores equal: two equal product keys give their pairs equal scores in either order. A GPU
    # and the oracle's CPU may choose differently then.
    if is_a_choice(subject, to_float64(sample()), _only(exact, asked), usual):
        return None
    return subject.problem(_only(subject.outcome(sample()), asked), exact)


def _only(outcome: Outcome, asked: list[str]) -> Outcome:
    return Outcome(outcome.results, {name: each for name, each in outcome.gradients.items() if name in asked})


def _vanishes(outcome: Outcome, usual: Outcome, name: str) -> bool:
    norms = [0.0 if each is None else float(each.norm()) for each in (outcome.gradients[name], usual.gradients[name])]
    return norms[0] < _VANISHED * norms[1]


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad)


def _upstream_laid_out(subject: Subject, position: Position, layout: Layout) -> str | None:
    def upstream(result: Tensor) -> Tensor:
        sent = upstream_of(result)
        return layout(sent) if sent.dim() else layout(sent.view(1)).view(())

    results = subject.exact(position).results
    if all(_lies(upstream(result)) == _lies(upstream_of(result)) for result in results):
        return None
    return subject.problem(subject.outcome(subject.draw(position), upstream), subject.exact(position))


def _lies(tensor: Tensor) -> tuple[object, ...]:
    return tensor.stride(), tensor.storage_offset()


def _summed(subject: Subject, position: Position) -> str | None:
    def ones(result: Tensor) -> Tensor:
        return result.new_ones(()).expand(result.shape)

    exact = subject.reference(to_float64(subject.draw(position)), ones)
    return subject.problem(subject.outcome(subject.draw(position), ones), exact)
