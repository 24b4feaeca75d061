"""Runs a module's own code in float64, to judge where it and a kernel differ because one of them rounds.

A sum whose terms cancel keeps few correct digits. The gradient of a decay is such a sum in a gated delta rule: where
tokens decay to almost nothing, transformers' own code gives multiples of float32's rounding of the terms, and not the
gradient. There a kernel that differs may be the one that is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from veomni_conformance.bound_models.model_calls import RecordedCall, draw_again
from veomni_conformance.bound_models.site_comparison import Run

_NARROWER = (torch.float32, torch.bfloat16, torch.float16)
_NARROWING = {getattr(Tensor, name) for name in ("float", "bfloat16", "half")}


def exact_run(
    module: nn.Module,
    call: RecordedCall,
    gradients: bool = True,
    set_random_states: Callable[[], None] = draw_again,
    run: Callable[..., Any] | None = None,
) -> Run:
    """Run the own code of ``module`` in float64 on a copy of it and of the recorded arguments.

    Where the code asks for a narrower floating dtype, it gets float64. ``run`` is called with the copy and the
    arguments, where the module's forward is not what is compared. The module must be unbound.

    Returns:
        The run; its ``problem`` says why there is none. It takes three times the memory of float32 parameters.
    """
    try:
        twin = copy.deepcopy(module).double()
    except Exception as error:  # a module may hold anything
        return Run(problem=f"it can't be copied into float64: {type(error).__name__}: {str(error)[:200]}")
    exact_call = replace(
        call,
        args=tuple(map(_widened, call.args)),
        kwargs={name: _widened(value) for name, value in call.kwargs.items()},
    )
    with _Float64():
        return Run.of(
            twin,
            exact_call,
            gradients=gradients,
            set_random_states=set_random_states,
            run=None if run is None else lambda *args, **kwargs: run(twin, *args, **kwargs),
        )


class _Float64(TorchFunctionMode):
    """Gives float64 to code that asks for a narrower floating dtype."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _NARROWING:
            return args[0].double()
        widened = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **widened)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROWER else value


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        wide = value.detach().double() if value.is_floating_point() else value
        return wide.requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return {name: _widened(each) for name, each in value.items()} if type(value) is dict else value
