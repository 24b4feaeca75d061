"""rms_norm sites: modules without children that normalise their last dimension."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.ops.rms_norm import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.site import AttributeChange, Change, Kernel, Site

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")
_RMS_NORM_CLASS = re.compile(r"rms_?norm", re.IGNORECASE)
_WIDTH = 16
# Rounding tells the variants apart, and only in these two pairs of (input, weight) dtypes: in float32 Llama's and
# OLMo 2's norms are equal, and with a bf16 weight so are several casts of it.
_EXACT_PAIRS = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))


class NormModules:
    """Finds norms by running their own code, and replaces their ``forward``."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str]] = {}
        for path, module in model.named_modules():
            eps = _eps(module)
            if eps is None or not _RMS_NORM_CLASS.search(type(module).__name__) or module._modules:
                continue
            if probe.takes(module, "gate"):  # another op
                continue
            key = probe.behaviour(module)
            if key not in proofs:
                proofs[key] = _prove(module, eps)
            variant, evidence = proofs[key]
            yield Site("rms_norm", path, rule, variant, evidence, probe.parameter_dtype(module), {"eps": eps})

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None) -> Iterable[Change]:
        assert kernel is not None
        module, eps = model.get_submodule(site.path), site.detail["eps"]
        weighted = module._parameters.get("weight") is not None
        forward = (_weighted if weighted else _unweighted)(kernel, eps)
        yield AttributeChange(module, "forward", MethodType(forward, module))


def _weighted(kernel: Kernel, eps: float) -> Kernel:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, self.weight, eps)  # type: ignore[no-any-return]

    return forward


def _unweighted(kernel: Kernel, eps: float) -> Kernel:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, None, eps)  # type: ignore[no-any-return]

    return forward


def _eps(module: nn.Module) -> float | None:
    values = (vars(module).get(name) for name in _EPS)
    return next((float(value) for value in values if isinstance(value, float)), None)


def _prove(module: nn.Module, eps: float) -> tuple[str | None, str]:
    names = [name for name, value in module._parameters.items() if value is not None]
    if names not in ([], ["weight"]):
        return None, f"has parameters {names}, expected one weight or none"
    tried = []
    with probe.seeded():
        for variant, contract in CONTRACTS.items():
            if variant.startswith("unweighted") == bool(names):
                continue
            why_not = _mismatch(module, contract.reference, eps, weighted=bool(names))
            if not why_not:
                return variant, "its own code gave the reference's bits in bf16 and its gradients in float32"
            tried.append(f"{variant}: {why_not}")
    return None, "; ".join(tried)


def _mismatch(module: nn.Module, reference: Kernel, eps: float, weighted: bool) -> str:
    for x_dtype, weight_dtype in _EXACT_PAIRS:
        # Small values as well as large, so that an eps which is read from the wrong place shows.
        for scale in (3.0, eps**0.5):
            x = probe.random(5, 3, _WIDTH, dtype=x_dtype, scale=scale)
            weight = probe.random(_WIDTH, dtype=weight_dtype, scale=0.5, shift=0.3) if weighted else None
            found, error = probe.attempt(partial(_run, module, weight, x))
            if error:
                return error
            wanted = reference(x, weight, eps)
            if not isinstance(found, Tensor) or found.dtype != wanted.dtype:
                return f"gives {getattr(found, 'dtype', type(found).__name__)} for {x_dtype}, expected {wanted.dtype}"
            if not probe.same_bits(found, wanted):
                share = float((found != wanted).double().mean())
                return f"{share:.0%} of elements differ for {x_dtype} with a {weight_dtype} weight"
    x = probe.random(5, 3, _WIDTH).requires_grad_()
    weight = probe.random(_WIDTH).requires_grad_() if weighted else None
    inputs = (x,) if weight is None else (x, weight)
    if not probe.gradients_close(_run(module, weight, x), reference(x, weight, eps), inputs):
        return "gradients differ in float32"
    return ""


def _run(module: nn.Module, weight: Tensor | None, x: Tensor) -> Any:
    twin = probe.bare_copy(module)
    if "normalized_shape" in vars(twin):  # torch's own norm
        vars(twin)["normalized_shape"] = (_WIDTH,)
    for name, value in module._buffers.items():
        # Random numbers: a norm whose result depends on a buffer matches nothing.
        twin._buffers[name] = None if value is None else probe.random(_WIDTH, dtype=x.dtype)
    if weight is not None:
        twin._parameters["weight"] = weight  # type: ignore[assignment]
        probe.resize_attributes(twin, {module._parameters["weight"].shape[-1]: _WIDTH})  # type: ignore[union-attr]
    return twin(x)
