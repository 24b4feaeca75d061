"""rms_norm_gated sites: modules without children that normalise their input and multiply it with a gate."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.spec import KernelSpec
from veomni_core.ops.rms_norm_gated import CONTRACTS
from veomni_core.sites import probe
from veomni_core.sites.code_reading import Reading, Readings, guarded_names, unseen_changes
from veomni_core.sites.norm_proof import Case, Inputs, Proof, eps_of, prove_norm
from veomni_core.sites.signatures import why_not_callable, with_own_signature
from veomni_core.sites.site import Kernel, Site

_WEIGHTS = ("weight",)


class GatedNormModules:
    """Finds gated norms by running their own code, and replaces their ``forward``."""

    def __init__(self) -> None:
        self._readings = Readings()

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, Proof] = {}
        for path, module in model.named_modules():
            eps = eps_of(module)
            if eps is None or "norm" not in type(module).__name__.lower() or module._modules:
                continue
            if not probe.takes(module, "gate"):
                continue
            reading = self._readings.of(module)
            key = probe.behaviour(module, reading.names)
            if key not in proofs:
                proofs[key] = _prove(module, reading, eps)
            detail = {"eps": eps, "group_size": vars(module).get("group_size")}
            dtype, sizes = probe.parameter_dtype(module), probe.width_of(module)
            yield Site("rms_norm_gated", path, rule, *proofs[key], dtype, detail, sizes=sizes)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None, spec: KernelSpec | None) -> Iterable[Change]:
        assert kernel is not None
        module = model.get_submodule(site.path)
        forward = _gated(kernel, site.detail["eps"], site.detail["group_size"])
        guarded = guarded_names(module, self._readings.of(module), _WEIGHTS)
        yield ForwardChange(module, with_own_signature(module, forward), guarded)


def _gated(kernel: Kernel, eps: float, group_size: int | None) -> Any:
    def forward(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        # `+eps`, or two such norms can't be compiled with dynamic=True: see norms.py.
        return kernel(hidden_states, gate, self.weight, +eps, group_size)

    return forward


def _prove(module: nn.Module, reading: Reading, eps: float) -> Proof:
    weights = {name: value for name, value in module._parameters.items() if value is not None}
    if list(weights) != ["weight"] or module._buffers or weights["weight"].dim() != 1:
        found = f"parameters {list(weights) or 'none'} and buffers {list(module._buffers)}"
        return None, f"has {found}, expected one weight of one dimension"
    if why_not := unseen_changes(module, reading, _WEIGHTS) or why_not_callable(module, proven=2):
        return None, why_not
    width, group_size = weights["weight"].shape[0], vars(module).get("group_size")

    def draw(case: Case) -> Inputs:
        x, weight = case.draw(width)
        # The gate stays small even where x is huge, so that their product stays finite.
        return x, probe.random(*case.leading, width, dtype=case.dtype, scale=2.0), weight

    references = {
        variant: partial(contract.reference, eps=eps, group_size=group_size) for variant, contract in CONTRACTS.items()
    }
    return prove_norm(module, reading, partial(_run, module), references, draw, eps)


def _run(module: nn.Module, training: bool, x: Tensor, gate: Tensor, weight: Tensor) -> Any:
    """The output of the module's own code, run on a copy."""
    duplicate = probe.bare_copy(module)
    duplicate.training = training
    duplicate._parameters["weight"] = weight  # type: ignore[assignment]
    return type(duplicate).forward(duplicate, x, gate)
