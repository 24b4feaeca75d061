"""moe_experts sites: modules that hold all experts' weights in two three-dimensional parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from veomni_core.changes.change import Change, ForwardChange, GuardChange
from veomni_core.descriptions.spec import KernelSpec
from veomni_core.sites import probe
from veomni_core.sites.code_reading import Readings, bypassed, guarded_names
from veomni_core.sites.expert_layouts import LAYOUTS, ExpertLayout, sizes_of
from veomni_core.sites.expert_proof import WEIGHTS, ExpertProof, prove_experts
from veomni_core.sites.experts_selection import EagerExpertsChange, is_dispatched, selected_implementation
from veomni_core.sites.signatures import with_own_signature
from veomni_core.sites.site import Kernel, Site


class ExpertsModules:
    """Finds modules of experts, and replaces their ``forward`` by the forward of their weights' layout.

    A subclass with other ``layouts`` proves modules that keep their weights in those.
    """

    layouts: Mapping[str, ExpertLayout] = LAYOUTS

    def __init__(self) -> None:
        self._readings = Readings()

    def find(self, model: nn.Module, rule: str) -> Iterable[Site]:
        proofs: dict[Any, ExpertProof] = {}
        for path, module in model.named_modules():
            weights = [module._parameters.get(name) for name in WEIGHTS[:2]]
            if any(weight is None or weight.dim() != 3 for weight in weights):
                continue
            reading = self._readings.of(module)
            key = probe.behaviour(module, reading.names)
            if key not in proofs:
                proofs[key] = prove_experts(module, self._readings, self.layouts)
            variant, evidence, layout = proofs[key]
            dtype, detail, own = probe.parameter_dtype(module), {"layout": layout}, selected_implementation(module)
            sizes = sizes_of(*weights)
            yield Site("moe_experts", path, rule, variant, evidence, dtype, detail, own, sizes=sizes)

    def install(self, model: nn.Module, site: Site, kernel: Kernel | None, spec: KernelSpec | None) -> Iterable[Change]:
        module = model.get_submodule(site.path)
        if kernel is None:
            if is_dispatched(module):
                yield EagerExpertsChange(module)
            return
        reading = self._readings.of(module)
        forward = with_own_signature(module, self.layouts[site.detail["layout"]].forward_with(kernel))  # type: ignore[arg-type]
        yield ForwardChange(module, forward, guarded_names(module, reading, WEIGHTS))
        for name, child in bypassed(module, reading, WEIGHTS):
            yield GuardChange(module, name, child, guarded_names(child, self._readings.of(child)))
