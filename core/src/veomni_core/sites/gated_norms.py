"""rms_norm_gated sites: modules without children that normalise their input and multiply it with a gate."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.changes import Change, ForwardChange
from veomni_core.ops.rms_norm_gated import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.norm_proof import Inputs, eps_of, prove_norm
from veomni_core.sites.site import Kernel, Site

_WIDTH, _GROUP = 16, 8


class GatedNormModules:
    """Finds gated norms by running their own code, and replaces their ``forward``."""

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, tuple[str | None, str]] = {}
        for path, module in model.named_modules():
            eps = eps_of(module)
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
        yield ForwardChange(module, forward)


def _gated(kernel: Kernel, eps: float, group_size: int | None) -> Kernel:
    def forward(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return kernel(hidden_states, gate, self.weight, eps, group_size)  # type: ignore[no-any-return]

    return forward


def _prove(module: nn.Module, eps: float) -> tuple[str | None, str]:
    names = [name for name, value in module._parameters.items() if value is not None]
    if names != ["weight"] or module._buffers:
        return None, f"has parameters {names or 'none'} and buffers {list(module._buffers)}, expected one weight"
    group_size = _GROUP if "group_size" in vars(module) else None

    def draw(x_dtype: torch.dtype, weight_dtype: torch.dtype, scale: float) -> Inputs:
        x, gate = (probe.random(5, 3, _WIDTH, dtype=x_dtype, scale=s) for s in (scale, 2.0))
        return x, gate, probe.random(_WIDTH, dtype=weight_dtype, scale=0.5, shift=0.3)

    references = {
        variant: partial(contract.reference, eps=eps, group_size=group_size) for variant, contract in CONTRACTS.items()
    }
    return prove_norm(partial(_run, module), references, draw, eps)


def _run(module: nn.Module, x: Tensor, gate: Tensor, weight: Tensor) -> Any:
    """What the module's own code gives for tiny inputs."""
    twin = probe.bare_copy(module)
    twin._parameters["weight"] = weight  # type: ignore[assignment]
    probe.resize_attributes(twin, {module._parameters["weight"].shape[-1]: _WIDTH})  # type: ignore[union-attr]
    if "group_size" in vars(twin):
        vars(twin)["group_size"] = _GROUP
    return twin(x, gate)
