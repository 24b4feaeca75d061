"""rms_norm_gated sites: modules without children that normalise their input and multiply it with a gate."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.ops.rms_norm_gated import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.site import AttributeChange, Change, Kernel, Site

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_WIDTH, _GROUP = 16, 8
_EXACT_PAIRS = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))


class GatedNormModules:
    """Finds gated norms by running their own code, and replaces their ``forward``."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str]] = {}
        for path, module in model.named_modules():
            eps = next((vars(module)[name] for name in _EPS if isinstance(vars(module).get(name), float)), None)
            if eps is None or "norm" not in type(module).__name__.lower() or module._modules:
                continue
            if not probe.takes(module, "gate"):
                continue
            key = probe.behaviour(module)
            if key not in proofs:
                proofs[key] = _prove(module, eps)
            detail = {"eps": eps, "group_size": vars(module).get("group_size")}
            yield Site("rms_norm_gated", path, rule, *proofs[key], probe.parameter_dtype(module), detail)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        forward = _gated(kernel, site.detail["eps"], site.detail["group_size"])
        yield AttributeChange(module, "forward", MethodType(forward, module))


def _gated(kernel: Kernel, eps: float, group_size: int | None) -> Kernel:
    def forward(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return kernel(hidden_states, gate, self.weight, eps, group_size)  # type: ignore[no-any-return]

    return forward


def _prove(module: nn.Module, eps: float) -> tuple[str | None, str]:
    names = [name for name, value in module._parameters.items() if value is not None]
    if names != ["weight"] or module._buffers:
        return None, f"has parameters {names or 'none'} and buffers {list(module._buffers)}, expected one weight"
    tried = []
    with probe.seeded():
        for variant, contract in CONTRACTS.items():
            why_not = _mismatch(module, contract.reference, eps)
            if not why_not:
                return variant, "its own code gave the reference's bits in bf16 and its gradients in float32"
            tried.append(f"{variant}: {why_not}")
    return None, "; ".join(tried)


def _mismatch(module: nn.Module, reference: Kernel, eps: float) -> str:
    group = _GROUP if "group_size" in vars(module) else None
    for x_dtype, weight_dtype in _EXACT_PAIRS:
        for scale in (3.0, eps**0.5):
            x, gate = (probe.random(5, 3, _WIDTH, dtype=x_dtype, scale=s) for s in (scale, 2.0))
            weight = probe.random(_WIDTH, dtype=weight_dtype, scale=0.5, shift=0.3)
            found, error = probe.attempt(partial(_run, module, weight, x, gate))
            if error:
                return error
            wanted = reference(x, gate, weight, eps, group)
            if not isinstance(found, Tensor) or found.dtype != wanted.dtype or found.shape != wanted.shape:
                return f"gives {getattr(found, 'dtype', type(found).__name__)} for {x_dtype}, expected {wanted.dtype}"
            if not probe.same_bits(found, wanted):
                share = float((found != wanted).double().mean())
                return f"{share:.0%} of elements differ for {x_dtype} with a {weight_dtype} weight"
    x, gate, weight = (probe.random(*shape).requires_grad_() for shape in ((5, 3, _WIDTH), (5, 3, _WIDTH), (_WIDTH,)))
    found, wanted = _run(module, weight, x, gate), reference(x, gate, weight, eps, group)
    return "" if probe.gradients_close(found, wanted, (x, gate, weight)) else "gradients differ in float32"


def _run(module: nn.Module, weight: Tensor, x: Tensor, gate: Tensor) -> Any:
    twin = probe.bare_copy(module)
    twin._parameters["weight"] = weight  # type: ignore[assignment]
    probe.resize_attributes(twin, {module._parameters["weight"].shape[-1]: _WIDTH})  # type: ignore[union-attr]
    if "group_size" in vars(twin):
        vars(twin)["group_size"] = _GROUP
    return twin(x, gate)
