"""What a model's rotary embeddings hand over to its attentions: seen by running them in small.

What a kernel may rely on in ``cos`` and ``sin`` is decided there, and nowhere in the function that takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites import probe
from veomni_core.sites.hollow_twin import BATCH, FREQUENCIES, LENGTH, ZERO, hollow_twin

_WIDTH = 16  # of hidden states, of which embeddings read only dtype and device


def all_handed_over(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Per path of a rotary embedding what its forward gives in bfloat16, run on hidden states and positions.

    An embedding that serves several kinds of layers gives one result per kind, and a mapping of them all. One that
    takes something else gives nothing.
    """
    kinds = {path: (module, _kinds(module)) for path, module in model.named_modules()}
    return {path: tuple(_handed_over(module, names)) for path, (module, names) in kinds.items() if names}


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
        layer = {"layer_type": kind} if kind else {}
        outcomes = (
            probe.attempt(lambda: hollow_twin(module)(ZERO.expand(BATCH, LENGTH, _WIDTH), positions, **layer))[0]  # noqa: B023
            for positions in _positions()
        )
        if (result := next(filter(_are_angles, outcomes), None)) is not None:
            results[kind] = result
    yield from results.values()
    if len(results) > 1:
        yield results


def _positions() -> Iterator[Tensor]:
    """In time, height and width, each its own; along one sequence; in rows and columns of patches."""
    for shape in ((3, BATCH, LENGTH), (BATCH, LENGTH), (LENGTH, 2)):
        yield torch.randint(64, shape)


def _are_angles(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.is_complex()
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(x, Tensor) for x in result):
        return False
    return all(x.shape[:-1] in ((BATCH, LENGTH), (1, LENGTH), (LENGTH,)) for x in result)
