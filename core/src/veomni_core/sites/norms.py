"""rms_norm sites: modules without children that normalise their last dimension."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes import Change, ForwardChange
from veomni_core.ops.rms_norm import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.norm_proof import Inputs, eps_of, prove_norm
from veomni_core.sites.site import Kernel, Site

_RMS_NORM_CLASS = re.compile(r"rms_?norm", re.IGNORECASE)
_WIDTH = 16


class NormModules:
    """Finds norms by running their own code, and replaces their ``forward``."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str]] = {}
        for path, module in model.named_modules():
            eps = eps_of(module)
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
        yield ForwardChange(module, forward)


def _weighted(kernel: Kernel, eps: float) -> Kernel:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, self.weight, eps)  # type: ignore[no-any-return]

    return forward


def _unweighted(kernel: Kernel, eps: float) -> Kernel:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, None, eps)  # type: ignore[no-any-return]

    return forward


def _prove(module: nn.Module, eps: float) -> tuple[str | None, str]:
    names = [name for name, value in module._parameters.items() if value is not None]
    if names not in ([], ["weight"]):
        return None, f"has parameters {names}, expected one weight or none"
    weighted = bool(names)

    def draw(x_dtype: torch.dtype, weight_dtype: torch.dtype, scale: float) -> Inputs:
        x = probe.random(5, 3, _WIDTH, dtype=x_dtype, scale=scale)
        return x, probe.random(_WIDTH, dtype=weight_dtype, scale=0.5, shift=0.3) if weighted else None

    references = {
        variant: partial(contract.reference, eps=eps)
        for variant, contract in CONTRACTS.items()
        if variant.startswith("unweighted") != weighted
    }
    return prove_norm(partial(_run, module), references, draw, eps)


def _run(module: nn.Module, x: Tensor, weight: Tensor | None) -> Any:
    """What the module's own code gives for tiny inputs."""
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
