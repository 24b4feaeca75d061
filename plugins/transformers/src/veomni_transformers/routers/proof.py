"""How routers are proven: run in a small copy of the module around them, free and with experts put in their place.

What the experts get is compared with the reference of the op ``router``: which experts, with which weights, and the
gradients of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.bound_subclass import eager_class
from veomni_core.changes.change import setter_of
from veomni_ops.router import LARGEST, SCORES, TOP_TWO, route
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import Readings, guarded_names
from veomni_transformers.proving.reachable_code import own_function
from veomni_transformers.routers.choices import Forced, indices_in

_TOP_K = "topk"
_BATCH, _LENGTH = 2, 9
_ROUNDING = 2e-5  # of float32, relative to the largest
_WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Chooser:
    """What is proven of one router.

    Attributes:
        name: the router's, among the children of the module around it and the experts.
        top_k, experts: how many it chooses, of how many.
        number, calls: which call of ``topk`` chooses, of how many in a forward.
        variant: of the op ``router``.
    """

    name: str
    top_k: int
    experts: int
    number: int
    calls: int
    variant: str


def experts_of(block: nn.Module) -> str:
    """The name of the experts among the children of ``block``: a module with three-dimensional weights of usual names.

    PEFT's adapters may be around them. Empty if there are none.
    """
    for name, child in block._modules.items() if not hasattr(block, "get_base_layer") else ():
        if all(weight is not None and weight.dim() == 3 for weight in _weights_of(child)):
            return name
    return ""


def _weights_of(experts: Any) -> list[Any]:
    bare = experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts
    return [None if bare is None else bare._parameters.get(name) for name in _WEIGHTS]


def prove_router(block: nn.Module, readings: Readings) -> tuple[Chooser | None, str]:
    """What the router beside the experts of ``block`` does, or why that is not known."""
    with probe.seeded():
        twin, name = _Twin(block), ""
        names = [each for each, child in twin.block._modules.items() if child is not None and each != twin.experts]
        routers = [each for each in names if _TOP_K in readings.of(twin.block._modules[each]).names]  # type: ignore[arg-type]
        if len(routers) != 1:
            return None, f"{len(routers)} modules beside its experts choose by topk, expected one"
        name = routers[0]
        if setter := setter_of(block._modules[name]):  # type: ignore[arg-type]
            return None, f"the forward of its {name} was set on the instance: it was {setter}"
        twin.keep(name)
        router: Any = twin.block._modules[name]
        reading = readings.of(router)
        children = [readings.of(each) for each in router.modules()]
        branches = Branches(
            reading.with_children(children).codes, guarded_names(router, reading), own_function(router), is_helper=True
        )
        if probe.draws_random_numbers(partial(twin.run, Forced(None), training=True)):
            return None, f"its {name} draws random numbers in training mode"
        for training in (True, False):
            chooser, why_not = _proven(twin, name, branches, training)
            if chooser is None:
                return None, f"its {name}: {why_not}"
        why_not = branches.never_run()
        return (None, f"its {name}: {why_not}") if why_not else (chooser, "")


def _proven(twin: _Twin, name: str, branches: Branches, training: bool) -> tuple[Chooser | None, str]:
    watching = Forced(None)
    free, error = probe.attempt(partial(branches.run, partial(twin.run, watching, training=training)))
    if error:
        return None, f"it raised when it was run alone: {error}"
    index = _index(free, free.given)
    if index is None:
        return None, "what its experts get is not what it gives as indices"
    rows, top_k = index.shape
    fits = [(i, experts) for i, (k, experts) in enumerate(watching.widths) if k == top_k]
    calls = len(watching.widths)
    for number, experts in fits:
        chosen = torch.rand(rows, experts, generator=probe.generator()).argsort(-1)[:, :top_k]
        chosen[::3] = -1
        forced, error = probe.attempt(partial(twin.run, Forced(chosen, number, calls), training=training))
        wanted = torch.where(chosen < 0, index, chosen)
        if error or (got := _index(forced, forced.given)) is None or not got.equal(wanted):
            continue
        variant, why_not = _weights(twin, name, free, forced, wanted, experts)
        return (Chooser(name, top_k, experts, number, calls, variant), "") if variant else (None, why_not)
    return None, "what its experts get is not what a call of topk in it chose"


@dataclass(frozen=True)
class _Run:
    """What the router gave in one run, and what the experts were given beside the hidden states."""

    result: tuple[Any, ...]
    given: list[Tensor]
    hidden: Tensor


def _index(run: _Run, given: list[Tensor]) -> Tensor | None:
    """The router's indices ``[N, K]``, if the experts were given the same."""
    found = [each for each in indices_in(run.result) if each.dim() == 2]
    same = [each for each in given if not each.is_floating_point() and each.dim() == 2]
    return found[0] if len(found) == len(same) == 1 and found[0].equal(same[0]) else None


def _weights(twin: _Twin, name: str, free: _Run, forced: _Run, chosen: Tensor, experts: int) -> tuple[str, str]:
    """The variant whose reference gives the router's choices and weights in both runs, or why there is none."""
    index = _index(free, free.given)
    assert index is not None
    logits, weights = (_of_width(free, forced, width) for width in (experts, index.shape[1]))
    if logits is None or weights is None:
        return "", "it gives no logits and weights beside its indices"
    router: Any = twin.block._modules[name]
    leaves = [forced.hidden, *(each for each in router.parameters() if each.dim() > 1)]
    nearest = float("inf")
    for options in _options(twin, router, experts):
        wanted, places = route(logits[0], index.shape[1], **options)
        if not places.sort().values.equal(index.sort().values):
            continue
        ours, theirs = (w.gather(-1, i.argsort()) for w, i in ((wanted, places), (weights[0], index)))
        scale = float((theirs.double().sum() / ours.double().sum()).detach())
        if (miss := probe.largest_miss(theirs, ours * scale)) > _ROUNDING:
            nearest = min(nearest, miss)
            continue
        wanted, _ = route(logits[1], index.shape[1], **options, scale=scale, chosen=chosen)
        if miss := probe.miss(weights[1], wanted, leaves):
            return "", f"through a given choice its weights or their gradients miss {options['variant']} by {miss:.2%}"
        own = (index == chosen).all(-1)
        if not weights[0][own].equal(weights[1][own]):
            return "", "a row that chooses itself has other weights where other rows are given theirs"
        return str(options["variant"]), ""
    off = "" if nearest == float("inf") else f"; with the same choices the nearest is off by {nearest:.2%}"
    return "", f"its choices and weights fit no variant of router{off}"


def _of_width(free: _Run, forced: _Run, width: int) -> tuple[Tensor, Tensor] | None:
    """The first numbers ``[N, width]`` that the router gives in both runs."""
    found = [
        next(
            (x for x in run.result if isinstance(x, Tensor) and x.is_floating_point() and x.shape[1:] == (width,)), None
        )
        for run in (free, forced)
    ]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _options(twin: _Twin, router: nn.Module, experts: int) -> Iterator[dict[str, Any]]:
    tensors = [*router.parameters(), *router.buffers(), *twin.block._parameters.values(), *twin.block._buffers.values()]
    biases = [
        None,
        *(each.detach().float().flatten() for each in tensors if each is not None and each.numel() == experts),
    ]
    counts = {1, *(v for m in (router, twin.block) for v in vars(m).values() if type(v) is int and 1 < v <= experts)}
    grouped = [
        (g, k, by) for g, k in product(counts, counts) if k < g and experts % g == 0 for by in (TOP_TWO, LARGEST)
    ]
    for variant, bias, (groups, kept, by), normalize in product(
        SCORES, biases, [(1, 1, TOP_TWO), *grouped], (False, True)
    ):
        yield {
            **{"variant": variant, "bias": bias, "groups": groups, "kept_groups": kept, "group_score": by},
            "normalize": normalize,
        }


class _Twin:
    """A copy of a module with experts: its own code and its router's, and nothing in the place of other children."""

    def __init__(self, block: nn.Module) -> None:
        self._original, self.experts = block, experts_of(block)
        self.block: Any = _own(probe.bare_copy(block))
        for kind in ("_parameters", "_buffers"):
            vars(self.block)[kind].update(
                {n: probe.random(*t.shape) for n, t in vars(block)[kind].items() if t is not None}
            )
        gate_up, down = (weight.shape for weight in _weights_of(block._modules[self.experts]))
        self._width = down[1] if down[1] == gate_up[2] else down[2]
        for name, child in block._modules.items():
            self.block._modules[name] = None if child is None else _own(probe.bare_copy(child))

    def keep(self, name: str) -> None:
        """Leave out every child but the router of that name, which gets random tensors."""
        for each, child in self.block._modules.items():
            if each != name and child is not None:
                self.block._modules[each] = _Nothing()
        router = probe.full_copy(self._original._modules[name]).float()  # type: ignore[arg-type]
        for module in router.modules():
            _own(module)
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    scaled = tensor if tensor.dim() < 2 else tensor * tensor.shape[-1] ** -0.5
                    module._parameters[key] = nn.Parameter(scaled.detach())
        self.block._modules[name] = self._router = router
        self._hidden = probe.random(_BATCH, _LENGTH, self._width)

    def run(self, forced: Forced, training: bool) -> _Run:
        """One forward of the module, whose router runs within ``forced``."""
        hidden = self._hidden.clone().requires_grad_()
        results: list[Any] = []
        own = type(self._router).forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            with forced:
                results.append(own(self._router, *args, **kwargs))
            return results[-1]

        vars(self._router)["forward"] = watched
        self.block.train(training)
        try:
            self.block(hidden)
        finally:
            vars(self._router).pop("forward")
        given = [each for each in self.block._modules[self.experts].given if isinstance(each, Tensor)]
        return _Run(results[0] if isinstance(results[0], tuple) else (results[0],), given[1:], hidden)


class _Nothing(nn.Module):
    """Stands for experts, which it notes the inputs of, and for what else is beside a router."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.given = [*args, *kwargs.values()]
        return torch.zeros_like(self.given[0])


def _own(module: nn.Module) -> nn.Module:
    module.__class__ = eager_class(type(module))
    return module
