"""PEFT's adapters of parameters: their low-rank factors, which PEFT hands to a module as parametrizations.

In each forward, a ``ParamWrapper`` puts a parametrization over the parameter, calls the module, and takes it off.
Whoever reads the parameter gets the sum of weight and adapter. torch checks a new parametrization by computing that
sum, which is as large as all experts' weights. :func:`handing_factors` does without the check. It also hands over
several active adapters as one, of the sum of their ranks, where PEFT adds up their products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils import parametrize

from veomni_core.sites.walk import named_modules

ACTIVATE = "_activate_lora"  # the method of a ParamWrapper that puts the parametrization on, and takes it off
_PEFT = "peft.tuners.lora.layer"
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LowRankUpdate(nn.Module):
    """The parametrization ``W + scaling * lhs @ rhs``, computed where ``W`` is read.

    Args:
        lhs: ``[E, n, r]``.
        rhs: ``[E, r, m]``, for a ``W`` of ``[E, n, m]``.
        scaling: a factor.

    Example:
        >>> update = LowRankUpdate(torch.ones(1, 2, 1), torch.ones(1, 1, 3), 0.5)
        >>> update(torch.ones(1, 2, 3)).unique()
        tensor([1.5000])
    """

    def __init__(self, lhs: Tensor, rhs: Tensor, scaling: float) -> None:
        super().__init__()
        self.lhs, self.rhs, self.scaling = lhs, rhs, scaling

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # a parametrization keeps the weight's dtype
            return torch.baddbmm(weight, self.lhs, self.rhs, alpha=self.scaling)


def factors_in(parametrizations: Any) -> tuple[tuple[Tensor, Tensor, float] | None, str]:
    """``(lhs, rhs, scaling)`` of one parameter's parametrizations; or ``None``, and why its sum must be computed."""
    proxy, weight = parametrizations[0], parametrizations.original
    if len(parametrizations) > 1:
        return None, "several parametrizations lie over each other"
    if not isinstance(proxy, LowRankUpdate) and not _is_of_peft(proxy, "_LoraFactorsProxy"):
        return None, f"the parametrization {type(proxy).__name__} keeps no low-rank factors"
    if hasattr(weight, "placements"):
        return None, "the weights are sharded"
    return (proxy.lhs, proxy.rhs, proxy.scaling), ""


def is_peft_proxy(parametrization: nn.Module) -> bool:
    """Whether PEFT made this parametrization, so that its wrapper has not been changed to hand factors."""
    return _is_of_peft(parametrization, "_LoraFactorsProxy") or _is_of_peft(parametrization, "_LoraParameterProxy")


def wrappers_of(module: nn.Module, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The wrappers by which PEFT adapts parameters of ``module``, somewhere in ``model``, with their paths."""
    kind = _class_of_peft("ParamWrapper")
    if kind is None:  # asked for each layer's experts, and each time the whole model would be walked
        return
    for path, each in named_modules(model):
        if isinstance(each, kind) and hands_factors(each) and each.get_base_layer() is module:  # type: ignore[operator]
            yield path, each


def hands_factors(wrapper: nn.Module) -> bool:
    """Whether ``wrapper`` is one of PEFT's over a parameter, of a version that :func:`handing_factors` knows."""
    known = (ACTIVATE, "get_delta_factors", "_remove_parametrizations")
    return _is_of_peft(wrapper, "ParamWrapper") and all(hasattr(wrapper, name) for name in known)


def _is_of_peft(module: nn.Module, name: str) -> bool:
    kind = _class_of_peft(name)
    return kind is not None and isinstance(module, kind)


def _class_of_peft(name: str) -> type | None:
    """PEFT's class of that name, if PEFT is imported."""
    return getattr(sys.modules.get(_PEFT), name, None)


def handing_factors(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper's :data:`ACTIVATE` that puts on a :class:`LowRankUpdate` of all active adapters, unchecked.

    It leaves to ``original`` what it doesn't know: a single expert, weights of 8 bits, and a parameter that other code
    has parametrized.
    """

    @contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        adapters = [name for name in active_adapters if name in self.lora_A]
        base, name = self.get_base_layer(), self.parameter_name
        taken = parametrize.is_parametrized(base, name)
        if not adapters or taken or self.num_experts == 1 or self.get_param().dtype not in _WEIGHT_DTYPES:
            with original(self, active_adapters):
                yield
            return
        update = LowRankUpdate(*_as_one([self.get_delta_factors(adapter) for adapter in adapters]))
        # torch sets the weight to itself, which would count as a write into what an earlier forward has saved.
        with _unsafe_preserve_version_counter(self.get_param()):
            parametrize.register_parametrization(base, name, update, unsafe=True)
        try:
            with parametrize.cached():  # so that own code which reads the parameter twice computes the sum once
                yield
        finally:
            self._remove_parametrizations()

    return _activate_lora


def _as_one(factors: list[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor, float]:
    """The factors of a sum of adapters: those of each side by side, scaled before."""
    if len(factors) == 1:
        return factors[0]
    lhs = torch.cat([each * scaling for each, _, scaling in factors], dim=2)
    return lhs, torch.cat([each for _, each, _ in factors], dim=1), 1.0
