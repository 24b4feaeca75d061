"""Activations of a model's own code, outside of sites, whose bits on a CPU don't depend on how many elements there are.

torch computes most of a tensor's elements in vectors, and those at its end, or at the end of a thread's share, one by
one: with other bits (2.13, in float32). Under ``require: batch_invariant`` a module whose code names an activation, as
routers and gates do, gets all elements computed in vectors: a copy is filled up, and cut into parts that no threads
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from veomni_core.binding.model_rules import WholeModelRule
from veomni_core.changes.change import Change, ForwardChange
from veomni_core.discovery.registry import Registry
from veomni_core.planning.plan import Plan
from veomni_core.sites.walk import named_modules
from veomni_transformers.proving.functions import code_layers, current_forward
from veomni_transformers.proving.reachable_code import is_library, nested_code, reached_functions, undecorated

_ACTIVATIONS = frozenset(
    (
        torch.sigmoid,
        Tensor.sigmoid,
        torch.special.expit,
        F.softplus,
        F.silu,
        F.gelu,
        F.mish,
        F.elu,
        F.selu,
        F.celu,
    )  # of x alone, or x first
)
_NAMES = frozenset(each.__name__ for each in _ACTIVATIONS)
_VECTOR, _PART = 64, 2**14  # elements: a multiple of what vectors hold, and fewer than torch gives to several threads


class WholeVectors(WholeModelRule):
    """Changes nothing in a plan that requires no batch invariance, or is for another device."""

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """Forwards whose activations have the same bits in every batch."""
        if "batch_invariant" not in plan.require or plan.hardware.device_type != "cpu":
            return
        for path, module in named_modules(model):
            if _activates(module):
                yield path, ForwardChange(module, _in_vectors(current_forward(module)))


def _activates(module: nn.Module) -> bool:
    """Whether its code names an activation, or a function that does, or it holds one."""
    forward = current_forward(module)
    if any(undecorated(each) in _ACTIVATIONS for each in vars(module).values() if callable(each)):
        return True
    helpers = (each for each in reached_functions([forward], type(module)) if not is_library(each))
    code = (each for f in (*code_layers(forward), *helpers) for each in nested_code(f.__code__))
    return any(not _NAMES.isdisjoint(each.co_names) for each in code)


def _in_vectors(forward: Callable[..., Any]) -> Callable[..., Any]:
    def in_vectors(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Vectors():
            return forward(self, *args, **kwargs)

    # Traced in a mode, kernels' shapes end torch.compile's graph, and what it runs then is wrong (2.13).
    return torch.compiler.disable(in_vectors)  # type: ignore[no-any-return]


class _Vectors(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rest = {name: value for name, value in kwargs.items() if name != "input"}
        x, *others = args or (kwargs.get("input"),)
        if func not in _ACTIVATIONS or x.device.type != "cpu" or kwargs.get("inplace") or "out" in kwargs:
            return func(*args, **kwargs)
        return in_whole_vectors(func, x, *others, **rest)


def in_whole_vectors(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``function(x, ...)``, which computes each element by itself, with all of them in vectors.

    Example:
        >>> x = torch.randn(1000)
        >>> torch.equal(in_whole_vectors(torch.sigmoid, x)[:7], in_whole_vectors(torch.sigmoid, x[:7]))
        True
    """
    filled = F.pad(x.reshape(-1), (0, -x.numel() % _VECTOR))
    return torch.cat([function(part, *args, **kwargs) for part in filled.split(_PART)])[: x.numel()].view(x.shape)
