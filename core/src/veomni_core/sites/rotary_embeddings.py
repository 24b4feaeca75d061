"""What a model's rotary embeddings hand over to its attentions: seen by running them in small.

What a kernel may rely on in ``cos`` and ``sin`` is decided there, and nowhere in the function that takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.ops.rotation import AngleLayout
from veomni_core.sites import probe
from veomni_core.sites.branches import Branches
from veomni_core.sites.code_reading import read_function
from veomni_core.sites.hollow_twin import BATCH, FREQUENCIES, LENGTH, ZERO, hollow_twin

_WIDTH = 16  # of hidden states, of which embeddings read only dtype and device
# Positions below these: near the start, and then as far as any released model goes, by powers of four.
_NEAR, _FAR = 64, (256, 1024, 4096, 16384, 65536, 262144, 4194304)


def all_handed_over(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Per path of a rotary embedding what its forward gives in bfloat16, run on hidden states and positions.

    An embedding that serves several kinds of layers gives one result per kind, and a mapping of them all. One that
    takes something else gives nothing.
    """
    kinds = {path: (module, _kinds(module)) for path, module in model.named_modules()}
    seen: dict[Any, tuple[Any, ...]] = {}
    found = {}
    for path, (module, names) in kinds.items():
        if names:
            key = probe.behaviour(module)
            if key not in seen:
                seen[key] = tuple(_handed_over(module, names))
            found[path] = seen[key]
    return found


def nearest(path: str, handed_over: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """What the embeddings next to ``path`` or to the closest module around it hand over; ``(None,)`` for nothing."""
    depth = {place: _depth_around(path, place) for place in handed_over}
    closest = max(depth.values(), default=-1)
    results = [result for place, results in handed_over.items() if depth[place] == closest >= 0 for result in results]
    return tuple(results) or (None,)


def _depth_around(path: str, place: str) -> int:
    """How deep the module that holds ``place`` lies, where ``path`` lies within it too; else -1."""
    holder = place.split(".")[:-1]
    return len(holder) if path.split(".")[: len(holder)] == holder else -1


def _kinds(module: nn.Module) -> list[str]:
    """The kinds of layers that have frequencies of their own; one without a name where all share them."""
    names = [name.removesuffix(FREQUENCIES).rstrip("_") for name in module._buffers if name.endswith(FREQUENCIES)]
    return [name for name in names if not name.endswith("original")]


def _handed_over(module: nn.Module, kinds: list[str]) -> Iterator[Any]:
    results = {}
    for kind in kinds:
        seen = _Seen(module, {"layer_type": kind} if kind else {})
        if seen.why_not:
            yield Unsteady(seen.why_not)
        elif seen.near is not None:
            results[kind] = seen.near
    yield from results.values()
    if len(results) > 1:
        yield results


@dataclass(frozen=True)
class Unsteady:
    """Why what an embedding hands over in small says nothing about what it hands over elsewhere."""

    why_not: str


class _Seen:
    """What an embedding gives near the start of a sequence, and why that is not so elsewhere, where it isn't."""

    def __init__(self, module: nn.Module, layer: dict[str, str]) -> None:
        self._module, self._layer = module, layer
        forward = type(module).forward
        settings = frozenset({*vars(module), *module._buffers, *dir(type(module))})
        codes = read_function(forward, type(module)).codes
        self._branches = Branches(codes, settings, inspect.unwrap(forward), is_helper=True)  # type: ignore[arg-type]
        near = [self._result(positions) for positions in _positions(_NEAR)]
        self.near = next(filter(_are_angles, near), None)
        self.why_not = self._why_not() if self.near is not None else ""

    def _why_not(self) -> str:
        layouts = _layouts(self.near)
        for farthest in _FAR:
            results = [result for positions in _positions(farthest) if _are_angles(result := self._result(positions))]
            for result in results[:1]:
                if _layouts(result) != layouts:
                    return f"its cos and sin are laid out in another way at positions up to {farthest}"
        open_choice = self._branches.never_run()
        return f"its rotary embedding's {open_choice}" if open_choice else ""

    def _result(self, positions: Tensor) -> Any:
        duplicate, x = hollow_twin(self._module), ZERO.expand(BATCH, LENGTH, _WIDTH)
        return probe.attempt(lambda: self._branches.run(lambda: duplicate(x, positions, **self._layer)))[0]


def _layouts(result: Any) -> frozenset[AngleLayout]:
    angles = (result,) if isinstance(result, Tensor) else result
    return frozenset(layout for layout in AngleLayout if all(layout.holds(each) for each in angles))


def _positions(farthest: int) -> Iterator[Tensor]:
    """In time, height and width, each its own; along one sequence; in rows and columns of patches."""
    for shape in ((3, BATCH, LENGTH), (BATCH, LENGTH), (LENGTH, 2)):
        yield torch.randint(farthest, shape, generator=probe.generator())


def _are_angles(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.is_complex()
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(x, Tensor) for x in result):
        return False
    return all(x.shape[:-1] in ((BATCH, LENGTH), (1, LENGTH), (LENGTH,)) for x in result)
