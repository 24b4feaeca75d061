"""Records how an attention calls its rotary function, by running its forward on zeros without computing its linears."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from veomni_ops.rotation import AngleLayout
from veomni_transformers.proving import probe
from veomni_transformers.proving.functions import with_globals
from veomni_transformers.proving.hollow_twin import BATCH, LENGTH, ZERO, LinearsOfZeros, hollow_twin

_WIDTH = 16  # of hidden states where no config says how wide they are
_OF_ANGLES = "freqs"
Function = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """One call of a rotary function: its arguments, and whether its ``cos`` and ``sin`` come from the model itself."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    handed_over: bool = True

    @property
    def form(self) -> Hashable:
        """A key that is equal for calls that one proof covers."""
        plain = tuple(_plain(value) for value in (*self.args, *self.kwargs.values()))
        layouts = [layout for layout in AngleLayout if all(layout.holds(angles) for angles in self.angles)]
        return self.name, plain, tuple(self.kwargs), tuple(layouts), self.handed_over

    @property
    def angles(self) -> tuple[Tensor, ...]:
        """``cos`` and ``sin``: the last two arguments, as far as they are tensors."""
        return tuple(value for value in self.args[-2:] if isinstance(value, Tensor) and value.dim())

    @property
    def described(self) -> str:
        """The arguments, for a message."""
        positional = ", ".join(_kind(v) for v in self.args)
        return ", ".join([positional, *(f"{name}={_plain(value)}" for name, value in self.kwargs.items())])


@dataclass(frozen=True)
class Run:
    """The rotary calls of one run of an attention, and the error that ended the run early, if any."""

    calls: tuple[Call, ...]
    why_it_ended: str


def run(module: nn.Module, forward: Function, functions: Iterable[str], candidates: Iterable[Any]) -> tuple[Run, ...]:
    """Run ``forward`` on small inputs with each of ``candidates`` as position embeddings, and record its rotary calls.

    A candidate of ``None`` stands for unknown ones: placeholders are used. To be called within :func:`probe.seeded`.
    """
    seen: list[Call] = []
    traced = with_globals(forward, {name: _recorder(name, seen) for name in functions})
    parameters = list(inspect.signature(traced).parameters.values())[1:]
    twin, numbers = hollow_twin(module), probe.OwnNumbersWhileDrawn()

    def attempt(leading: tuple[int, ...], positions: Any, others: bool = False) -> Run:
        seen.clear()
        inputs = _inputs(module, parameters, leading, positions) | (_others(module, parameters) if others else {})
        with torch.no_grad(), numbers.run(), LinearsOfZeros():
            _, why_it_ended = probe.attempt(lambda: traced(twin, **inputs))
        if not all(_keeps_sides_apart(call, leading) for call in seen):
            return Run((), "it reshapes its queries and keys in a way that is not recognised")
        return Run(tuple(seen if positions is not None else map(_with_stand_ins, seen)), why_it_ended)

    def tried(positions: Any) -> Run:
        runs = (
            attempt(leading, positions, others) for others in (False, True) for leading in ((BATCH, LENGTH), (LENGTH,))
        )
        first = next(runs)
        return next((each for each in chain([first], runs) if each.calls or not each.why_it_ended), first)

    return tuple(map(tried, candidates))


def _recorder(name: str, seen: list[Call]) -> Function:
    def record(*args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or any(isinstance(value, str) for value in args):
            raise TypeError(f"{name} is given {', '.join(map(_kind, args)) or 'nothing by position'}")
        args = (*args, *(value for key, value in kwargs.items() if _OF_ANGLES in key))  # Llama 4's vision names them
        seen.append(Call(name, args, {key: value for key, value in kwargs.items() if _OF_ANGLES not in key}))
        both = len(args) > 3 or not isinstance(args[1], Tensor) or args[1].dim() == args[0].dim()
        return args[:2] if both else args[0]  # a rotation keeps shapes

    return record


def _with_stand_ins(call: Call) -> Call:
    """``call`` with placeholders ``[B, S, D]`` for ``cos`` and ``sin``, as wide as the queries ``[B, S, H, D]``."""
    args = call.args
    if len(args) == 3 and args[2] is None and args[0].dim() == 4:  # it may take complex angles of patches
        _, length, _, width = args[0].shape
        args = (*args[:2], torch.zeros(length, width // 2, dtype=torch.complex64))
    elif len(args) == 4:
        angles = torch.zeros(*args[0].shape[:-2], args[0].shape[-1])
        args = (*args[:2], angles, angles)
    return Call(call.name, args, call.kwargs, handed_over=False)


def _inputs(
    module: nn.Module, parameters: Iterable[inspect.Parameter], leading: tuple[int, ...], positions: Any
) -> dict[str, Any]:
    unknown = (torch.zeros(LENGTH, 2),) * 2
    known = {
        "hidden_states": ZERO.expand(*leading, _hidden_size(module)),
        "position_embeddings": unknown if positions is None else positions,
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
        "cu_seqlens": torch.tensor([0, LENGTH]),
    }
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: known.get(p.name) for p in named if p.name in known or p.default is p.empty}


def _others(module: nn.Module, parameters: Iterable[inspect.Parameter]) -> dict[str, Any]:
    """What cross-attention reads, and stand-ins for masks and chosen keys."""
    states = ZERO.expand(BATCH, LENGTH, _hidden_size(module))
    chosen = torch.arange(LENGTH, dtype=torch.int32).expand(BATCH, LENGTH, LENGTH)
    known = {"key_value_states": states, "encoder_hidden_states": states, "prev_topk_indices": chosen}
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known |= {name: mask for name, each in named.items() if name.endswith("mask") and each.default is each.empty}
    return {name: value for name, value in known.items() if name in named}


def _hidden_size(module: nn.Module) -> int:
    size = getattr(vars(module).get("config"), "hidden_size", None)
    return size if isinstance(size, int) else _WIDTH


def _keeps_sides_apart(call: Call, leading: tuple[int, ...]) -> bool:
    """Whether the rotated tensor has four dimensions, batch first; or ``[S, H, D]`` or ``[1, S, H, D]`` without one."""
    shape = call.args[0].shape
    if leading == (LENGTH,):
        return LENGTH in (shape[0], *shape[1:2])
    return len(shape) == 4 and shape[0] == BATCH


def _plain(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a complex tensor" if value.is_complex() else "a tensor"
    return type(value).__name__
