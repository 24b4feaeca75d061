"""rms_norm sites: modules without children that normalise their last dimension."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from veomni_core.changes.change import Change, ForwardChange
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_ops.contract import Contract
from veomni_ops.rms_norm import CONTRACTS
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.forwards import norms
from veomni_transformers.forwards.signatures import why_not_callable, with_own_signature
from veomni_transformers.norms.proof import Case, Inputs, eps_of, prove_norm
from veomni_transformers.norms.sharded import sharded_norm
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_read import module_at
from veomni_transformers.proving.code_reading import Reading, guarded_names, unseen_changes
from veomni_transformers.proving.module_locator import ModuleLocator, refuse_empty
from veomni_transformers.proving.proof import Proof

_RMS_NORM_CLASS = re.compile(r"rms_?norm", re.IGNORECASE)
_LAYER_NORM_CLASS = re.compile(r"layer_?norm", re.IGNORECASE)  # T5's name of an RMS norm
_WIDTH_WITHOUT_A_WEIGHT = 64  # an unweighted norm doesn't say how wide its inputs are
_WIDEST = 32768  # the widest row that is run, so that a proof stays fast; one released model has a norm of 614,400
_WEIGHTS = ("weight",)


class NormModules(ModuleLocator):
    """Finds norms by running their own code, and replaces their ``forward``.

    A subclass with other ``contracts`` proves modules that compute those variants.

    Example:
        >>> import torch
        >>> from dataclasses import replace
        >>> from veomni_ops.contract import compute_dtype
        >>> def exponential(x, weight, eps):
        ...     wide = compute_dtype(x)
        ...     return nn.functional.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide).exp(), eps).to(x.dtype)
        >>> CONTRACT = replace(CONTRACTS["standard"], variant="exponential", reference=exponential, rounding={})
        >>> class ExponentialNorms(NormModules):
        ...     contracts = {"exponential": CONTRACT}
        >>> class ExponentialRMSNorm(nn.RMSNorm):
        ...     def forward(self, x):
        ...         scale = x.float().square().mean(-1, keepdim=True).add(self.eps).rsqrt()
        ...         return (x.float() * scale * torch.exp(self.weight.float())).to(x.dtype)
        >>> model = nn.Sequential(ExponentialRMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6))
        >>> [(site.path, site.variant) for site in NormModules().find(model, "norm modules")]
        [('0', None), ('1', 'cast_after')]
        >>> [(site.path, site.variant) for site in ExponentialNorms().find(model, "exponential norms")]
        [('0', 'exponential'), ('1', None)]
    """

    op_name = "rms_norm"
    contracts: Mapping[str, Contract] = CONTRACTS

    def __init__(self) -> None:
        super().__init__()
        refuse_empty(self, "contracts", "variant: Contract(...)")

    def is_candidate(self, module: nn.Module) -> bool:
        name = type(module).__name__
        if eps_of(module) is None or module._modules or probe.takes(module, "gate"):  # or rms_norm_gated, another op
            return False
        named = bool(_RMS_NORM_CLASS.search(name))
        return named or (
            bool(_LAYER_NORM_CLASS.search(name)) and list(module._parameters) == ["weight"] and _sees_mean(module)
        )

    def prove(self, module: nn.Module) -> Proof:
        return _prove(module, self.readings.of(module), self.contracts)

    def sizes(self, module: nn.Module) -> Mapping[str, tuple[int, ...]]:
        return probe.width_of(module)

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        return sharded_norm(site, layout)

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = module_at(model, site.path)
        weighted = module._parameters.get("weight") is not None
        forward = (norms.weighted if weighted else norms.unweighted)(kernel, site.detail["eps"])
        guarded = guarded_names(module, self.readings.of(module), _WEIGHTS)
        yield ForwardChange(module, with_own_signature(module, forward), guarded)


def _sees_mean(module: nn.Module) -> bool:
    """Whether it gives something else where every input is larger by one, as an RMS norm and no layer norm does."""
    with probe.seeded():
        copy = probe.full_copy(module).float()
        x = probe.random(2, module._parameters["weight"].shape[-1])  # type: ignore[union-attr]
        results, error = probe.attempt(lambda: (copy(x), copy(x + 1)))
        return not error and not probe.close(*results)


def _prove(module: nn.Module, reading: Reading, contracts: Mapping[str, Contract]) -> Proof:
    weights = {name: value for name, value in module._parameters.items() if value is not None}
    if list(weights) not in ([], ["weight"]):
        return Proof(None, f"has parameters {list(weights)}, expected one weight or none")
    if weights and weights["weight"].dim() != 1:
        return Proof(None, f"its weight has {weights['weight'].dim()} dimensions, expected one")
    if len(vars(module).get("normalized_shape", (1,))) != 1:  # torch's own norm
        dimensions = len(vars(module)["normalized_shape"])
        return Proof(None, f"it normalises {dimensions} dimensions, expected only the last one")
    if why_not := unseen_changes(module, reading, _WEIGHTS) or why_not_callable(module, proven=1):
        return Proof(None, why_not)
    width = min(weights["weight"].shape[0] if weights else _width_of(module), _WIDEST)

    def draw(case: Case) -> Inputs:
        x, weight = case.draw(width)
        return x, weight if weights else None

    fitting = {n: contract for n, contract in contracts.items() if n.startswith("unweighted") != bool(weights)}
    if not fitting:
        has, needed = ("a weight", "norms without one") if weights else ("no weight", "norms with one")
        return Proof(None, f"it has {has}, and is compared with {needed} alone: {', '.join(contracts)}")
    return prove_norm(module, reading, partial(_run, module), fitting, draw, {"eps": eps_of(module)})


def _width_of(module: nn.Module) -> int:
    shape = vars(module).get("normalized_shape", (_WIDTH_WITHOUT_A_WEIGHT,))
    return int(shape[0])


def _run(module: nn.Module, training: bool, x: Tensor, weight: Tensor | None) -> Any:
    """The output of the module's own code, run on a copy."""
    duplicate = probe.bare_copy(module)
    duplicate.training = training
    for name, value in module._buffers.items():  # unseen_changes has refused code that reads a buffer
        duplicate._buffers[name] = None if value is None else probe.random(*value.shape)
    if weight is not None:
        duplicate._parameters["weight"] = weight  # type: ignore[assignment]
        probe.resize_attributes(duplicate, {module._parameters["weight"].shape[0]: len(weight)})  # type: ignore[union-attr]
    return type(duplicate).forward(duplicate, x)
