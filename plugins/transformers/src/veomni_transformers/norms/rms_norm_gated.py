"""rms_norm_gated sites: modules without children that normalise their input and multiply it with a gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_ops.contract import Contract
from veomni_ops.rms_norm_gated import CONTRACTS
from veomni_transformers.changes.bypassed_children import MadeModules
from veomni_transformers.forwards import norms
from veomni_transformers.forwards.signatures import why_not_callable, with_own_signature
from veomni_transformers.norms.proof import Case, Inputs, eps_of, prove_norm
from veomni_transformers.norms.rms_norm import NormModules
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_read import makes_modules, module_at
from veomni_transformers.proving.code_reading import Reading, guarded_names, unseen_changes
from veomni_transformers.proving.proof import Proof

_WEIGHTS = ("weight",)


class GatedNormModules(NormModules):
    """Finds gated norms by running their own code, and replaces their ``forward``.

    A subclass with other ``contracts`` proves modules that compute those variants.

    Example:
        >>> from dataclasses import replace
        >>> from torch.nn.functional import rms_norm
        >>> from veomni_ops.contract import compute_dtype
        >>> def tanh(x, gate, weight, eps, group_size=None):
        ...     wide = compute_dtype(x)
        ...     normalised = rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps)
        ...     return (normalised * gate.to(wide).tanh()).to(x.dtype)
        >>> class TanhNorms(GatedNormModules):
        ...     contracts = {"tanh": replace(CONTRACTS["standard"], variant="tanh", reference=tanh)}
        >>> class TanhGatedNorm(nn.RMSNorm):
        ...     def forward(self, x, gate):
        ...         normalised = rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight.float()
        ...         return (normalised * gate.float().tanh()).to(x.dtype)
        >>> model = nn.Sequential(TanhGatedNorm(32, eps=1e-6))
        >>> for locator in (GatedNormModules(), TanhNorms()):
        ...     [site] = locator.find(model, "norms with a tanh gate")
        ...     print(site.variant, dict(site.detail))
        None {}
        tanh {'eps': 1e-06, 'group_size': None}
    """

    op_name = "rms_norm_gated"
    contracts: Mapping[str, Contract] = CONTRACTS

    def is_candidate(self, module: nn.Module) -> bool:
        if eps_of(module) is None or "norm" not in type(module).__name__.lower() or module._modules:
            return False
        return probe.takes(module, "gate")

    def prove(self, module: nn.Module) -> Proof:
        return _prove(module, self.readings.of(module), self.contracts)

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = module_at(model, site.path)
        makes, own = makes_modules(module), type(module).forward
        forward = norms.gated(kernel, site.detail["eps"], site.detail["group_size"], own if makes else None)
        guarded = guarded_names(module, self.readings.of(module), _WEIGHTS)
        yield ForwardChange(module, with_own_signature(module, forward), guarded)
        if makes:
            yield MadeModules()


def _prove(module: nn.Module, reading: Reading, contracts: Mapping[str, Contract]) -> Proof:
    weights = {name: value for name, value in module._parameters.items() if value is not None}
    if list(weights) != ["weight"] or module._buffers or weights["weight"].dim() != 1:
        found = f"parameters {list(weights) or 'none'} and buffers {list(module._buffers)}"
        return Proof(None, f"has {found}, expected one weight of one dimension")
    if why_not := unseen_changes(module, reading, _WEIGHTS) or why_not_callable(module, proven=2):
        return Proof(None, why_not)
    width = weights["weight"].shape[0]

    def draw(case: Case) -> Inputs:
        x, weight = case.draw(width)
        # The gate stays small even where x is huge, so that their product stays finite.
        return x, probe.random(*case.leading, width, dtype=case.dtype, scale=2.0), weight

    settings = {"eps": eps_of(module), "group_size": vars(module).get("group_size")}
    return prove_norm(module, reading, partial(_run, module), contracts, draw, settings)


def _run(module: nn.Module, training: bool, x: Tensor, gate: Tensor, weight: Tensor) -> Any:
    """The output of the module's own code, run on a copy."""
    duplicate = probe.bare_copy(module)
    duplicate.training = training
    duplicate._parameters["weight"] = weight  # type: ignore[assignment]
    return type(duplicate).forward(duplicate, x, gate)
