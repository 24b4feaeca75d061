"""Records how a mixer calls its convolution, by running its forward on zeros up to that call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from veomni_ops.causal_conv1d import ACTIVATIONS
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import with_globals
from veomni_transformers.proving.hollow_twin import BATCH, LENGTH, ZERO, hollow_twin

_WIDTH = 16  # of hidden states where no attribute, linear or convolution says how wide they are
Function = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """The first call of a mixer's convolution: the sizes of its weight, or why no kernel can take the call."""

    why_not: str = ""
    examined: bool = True
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class _Reached(Exception):
    """Ends the run: what a mixer does after its convolution, on tensors of real sizes, would only take time."""


def first_call(module: nn.Module, forward: Function, name: str) -> Call:
    """Run ``forward`` on small inputs, in training mode, until it calls the global function ``name``.

    To be called within :func:`probe.seeded`.
    """
    seen: list[Call] = []

    def record(*args: Any, **kwargs: Any) -> None:
        seen.append(_read(name, args, kwargs))
        raise _Reached

    traced, twin = with_globals(forward, {name: record}), hollow_twin(module).train()
    first, *others = list(inspect.signature(traced).parameters.values())[1:]
    inputs: dict[str, Any] = {first.name: ZERO.expand(BATCH, LENGTH, _hidden_size(module))}
    inputs |= {p.name: None for p in others if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    with torch.no_grad(), probe.own_numbers():
        _, why_it_ended = probe.attempt(lambda: traced(twin, **inputs))
    if seen:
        return seen[0]
    if why_it_ended:
        return Call(f"its forward could not be traced: {why_it_ended}", examined=False)
    return Call(f"its forward, in training and without a cache, does not call {name}")


def _read(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    try:
        given = inspect.signature(_as_called).bind(*args, **kwargs).arguments
    except TypeError as error:
        return Call(f"{name} is called in a way that no variant takes: {error}")
    x, weight, bias = given["x"], given["weight"], given.get("bias")
    if not all(isinstance(value, Tensor) for value in (x, weight)) or weight.dim() != 2:
        return Call(f"{name} is not given x[B, C, S] and weight[C, W]")
    sizes = {"channels": (weight.shape[0],), "width": (weight.shape[1],)}
    if x.shape != (BATCH, weight.shape[0], LENGTH):
        return Call(f"{name} is given x {list(x.shape)}, and {[BATCH, weight.shape[0], LENGTH]} was expected")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
        return Call(f"{name} is given a bias that is not one number for each channel")
    if given.get("activation") not in ACTIVATIONS:
        return Call(f"{name} is given the activation {given['activation']!r}, and kernels have silu or none")
    return Call(sizes=sizes)


def _as_called(
    x: Any, weight: Any, bias: Any = None, activation: Any = None, *, seq_idx: Any = None, position_ids: Any = None
) -> None:
    """The signature of transformers' functions, with what mixers add by themselves."""


def _hidden_size(module: nn.Module) -> int:
    return next((size for size in _sizes(module) if isinstance(size, int)), _WIDTH)


def _sizes(module: nn.Module) -> Iterator[Any]:
    yield vars(module).get("hidden_size")
    yield getattr(vars(module).get("config"), "hidden_size", None)
    yield from (getattr(child, "in_features", None) for child in module.children())
    # A module without a linear of its own, as Inkling's, convolves what it is given.
    yield from (getattr(child, "in_channels", None) for child in module.children())
