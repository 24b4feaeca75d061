"""The ``cos`` and ``sin`` that rotary embeddings pass to attention modules, found by running them on small inputs.

Fast kernels read only half of ``cos``, since in most models both halves are the same. That layout is decided in the
rotary embedding; the function that applies ``cos`` and ``sin`` does not show it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites.walk import named_modules
from veomni_ops.rotation import AngleLayout
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import read_function
from veomni_transformers.proving.hollow_twin import BATCH, FREQUENCIES, LENGTH, ZERO, hollow_twin
from veomni_transformers.proving.proof import ProvenOnce

_WIDTH = 16  # of the hidden states; embeddings read only their dtype and device
# Upper bounds of the random positions: near the start, and then up to where released models go.
_NEAR, _FAR = 64, (256, 1024, 4096, 16384, 65536, 262144, 4194304)


def all_handed_over(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """For the path of each rotary embedding, what its forward returns in bfloat16 for hidden states and positions.

    An embedding that serves several layer types has one result per type, and then a mapping of them all. An embedding
    whose forward takes other arguments has no result.
    """
    kinds = {path: (module, _kinds(module)) for path, module in named_modules(model)}
    results: ProvenOnce[tuple[Any, ...]] = ProvenOnce()
    return {
        path: results.of(probe.behaviour(module), partial(_handed_over, module, names))
        for path, (module, names) in kinds.items()
        if names
    }


def all_of(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings in ``model``."""
    return [module for _, module in named_modules(model) if _kinds(module)]


def nearest(path: str, handed_over: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """The results of the rotary embeddings in the nearest module around ``path``; ``(None,)`` if there are none."""
    depth = {place: _depth_around(path, place) for place in handed_over}
    closest = max(depth.values(), default=-1)
    results = [result for place, results in handed_over.items() if depth[place] == closest >= 0 for result in results]
    return tuple(results) or (None,)


def _depth_around(path: str, place: str) -> int:
    """The depth of the parent module of ``place`` if ``path`` lies within that parent too; else -1."""
    holder = place.split(".")[:-1]
    return len(holder) if path.split(".")[: len(holder)] == holder else -1


def _kinds(module: nn.Module) -> list[str]:
    """The layer types that have a buffer of frequencies of their own; ``[""]`` where all share one."""
    names = [name.removesuffix(FREQUENCIES).rstrip("_") for name in module._buffers if name.endswith(FREQUENCIES)]
    return [name for name in names if not name.endswith("original")]


def _handed_over(module: nn.Module, kinds: list[str]) -> tuple[Any, ...]:
    return tuple(_results(module, kinds))


def _results(module: nn.Module, kinds: list[str]) -> Iterator[Any]:
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
    """Stands for an embedding whose result on small inputs does not show its other results; ``why_not`` says why."""

    why_not: str


class _Seen:
    """An embedding's result near the start of a sequence (``near``), and why results elsewhere may differ in layout.

    ``why_not`` is empty if they don't.
    """

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
    """Random positions in three forms: in time, height and width; along a sequence; by rows and columns of patches."""
    for shape in ((3, BATCH, LENGTH), (BATCH, LENGTH), (LENGTH, 2)):
        yield torch.randint(farthest, shape, generator=probe.generator())


def _are_angles(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.is_complex() and result.shape[:-1] in ((BATCH, LENGTH), (1, LENGTH), (LENGTH,))
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(x, Tensor) for x in result):
        return False
    return all(x.shape[:-1] in ((BATCH, LENGTH), (1, LENGTH), (LENGTH,)) for x in result)
