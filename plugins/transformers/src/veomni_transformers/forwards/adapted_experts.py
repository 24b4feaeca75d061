"""The forward of experts whose parameters PEFT adapts: the kernel gets the adapters beside the frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes.bound_subclass import is_bound_by
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel
from veomni_ops.lora_samples import LORA
from veomni_transformers.changes.bound_modules import adopt, binding_in, remark
from veomni_transformers.forwards.expert_layouts import ExpertLayout, Forward
from veomni_transformers.forwards.peft_parameters import (
    ACTIVATE,
    factors_in,
    handing_factors,
    is_peft_proxy,
    wrappers_of,
)

_PROJECTIONS = ("gate_up_proj", "down_proj")


def forward_beside_adapters(layout: ExpertLayout, kernel: Kernel, spec: KernelSpec) -> Forward:
    """The forward of ``layout`` over ``kernel``, which hands adapters of the projections to the kernel.

    Without an adapter a call costs one look into a dictionary. Where the kernel can't take the adapters, it runs on the
    sum of weights and adapters, and the receipt says why.
    """
    plain = layout.forward_with(kernel)
    why_never = why_not_beside(layout, spec)
    beside = layout.forward_with(_with_adapters_of_weights(kernel))

    def adapted(self: Any, *tensors: Tensor) -> Tensor:
        weights, why_not = ({}, why_never) if why_never else _adapted_weights(self)
        if why_not:
            _remark(self, f"{spec.name} runs on a copy of the weights with the adapters added: {why_not}")
        if not weights:
            return plain(self, *tensors)
        return beside(_Beside(self, weights), *tensors)

    tensors = plain.__code__.co_argcount - 1  # type: ignore[attr-defined]  # without self
    return _ARITIES[tensors - 1](plain, adapted)


def why_not_beside(layout: ExpertLayout, spec: KernelSpec) -> str:
    """Why adapters can never reach the kernel beside weights of this layout, or an empty string."""
    if not layout.takes_adapters:
        return "adapters can't be passed beside weights of this layout"
    return "" if LORA in spec.features else f"{spec} has no feature {LORA!r}"


def _of_one(plain: Forward, adapted: Forward) -> Forward:
    def forward(self: Any, first: Tensor) -> Tensor:
        return (adapted if "parametrizations" in self._modules else plain)(self, first)

    return forward


def _of_two(plain: Forward, adapted: Forward) -> Forward:
    def forward(self: Any, first: Tensor, second: Tensor) -> Tensor:
        return (adapted if "parametrizations" in self._modules else plain)(self, first, second)

    return forward


def _of_three(plain: Forward, adapted: Forward) -> Forward:
    def forward(self: Any, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        return (adapted if "parametrizations" in self._modules else plain)(self, first, second, third)

    return forward


# The bound forward's number of arguments is read from its code, so there is a function for each.
_ARITIES: tuple[Callable[[Forward, Forward], Forward], ...] = (_of_one, _of_two, _of_three)


@dataclass(frozen=True)
class _AdaptedWeight:
    """``weight[E, out, in]`` and ``scaling * b[E, out, r] @ a[E, r, in]``, of which layouts take what they need."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scaling: float

    @property
    def shape(self) -> Any:
        return self.weight.shape

    def transpose(self, first: int, second: int) -> _AdaptedWeight:
        a, b = self.b.transpose(first, second), self.a.transpose(first, second)
        return replace(self, weight=self.weight.transpose(first, second), a=a, b=b)

    def __getitem__(self, experts: slice) -> _AdaptedWeight:
        return replace(self, weight=self.weight[experts], a=self.a[experts], b=self.b[experts])


class _Beside:
    """A module of experts as its layout reads it, with adapted weights in the place of parametrized parameters."""

    def __init__(self, module: nn.Module, weights: dict[str, _AdaptedWeight]) -> None:
        self._module = module
        vars(self).update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _with_adapters_of_weights(kernel: Kernel) -> Kernel:
    """``kernel``, which is called with adapted weights and gets weights and adapters."""

    def call(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Any, down: Any, *others: Any) -> Any:
        adapters: dict[str, Any] = {}
        if isinstance(gate_up, _AdaptedWeight):
            adapters["gate_up_lora"] = (gate_up.a, gate_up.b, gate_up.scaling)
            gate_up = gate_up.weight
        if isinstance(down, _AdaptedWeight):
            adapters["down_lora"] = (down.a, down.b, down.scaling)
            down = down.weight
        return kernel(hidden, top_k_index, top_k_weights, gate_up, down, *others, **adapters)

    return call


def _adapted_weights(module: nn.Module) -> tuple[dict[str, _AdaptedWeight], str]:
    """The projections that are parametrized, by name; or none, and why one of them keeps no factors.

    There is no reason in the first call after PEFT has wrapped a bound module: from the next call on there are factors.
    """
    weights = {}
    for name, parametrizations in module.parametrizations.items():  # type: ignore[operator, union-attr]
        if name not in _PROJECTIONS:
            continue
        changed = is_peft_proxy(parametrizations[0]) and _change_wrappers(module)
        factors, why_not = factors_in(parametrizations)
        if factors is None:
            return {}, "" if changed else f"{name}: {why_not}"
        weight = parametrizations.original
        if is_peft_proxy(parametrizations[0]) and not weight.requires_grad:
            # In PEFT's next forward torch sets the weight to itself: autograd would take that for a write into what the
            # kernel has saved.
            weight = weight.data
        lhs, rhs, scaling = factors
        weights[name] = _AdaptedWeight(weight, rhs, lhs, scaling)
    return weights, ""


def _change_wrappers(module: nn.Module) -> bool:
    """Let the wrappers that PEFT has put over ``module`` since bind hand over factors; whether there were any."""
    classes, changed = binding_in(module), False
    if classes is None or not classes.binding.active or torch.compiler.is_compiling():
        return changed
    for path, wrapper in wrappers_of(module, classes.binding.model):
        if not is_bound_by(wrapper, classes):
            adopt(classes, wrapper, handing_factors(getattr(type(wrapper), ACTIVATE)), path, name=ACTIVATE)
            changed = True
    return changed


def _remark(module: nn.Module, what: str) -> None:
    classes = binding_in(module)
    if classes is not None:
        remark(classes, classes.paths.get(module, f"a copy of a bound {type(module).__name__}"), what)
