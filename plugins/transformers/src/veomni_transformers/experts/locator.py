"""moe_experts sites: modules that hold all experts' weights in two three-dimensional parameters."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.changes.bound_subclass import eager_class
from veomni_core.changes.change import Change, ClassChange
from veomni_core.changes.code_places import CodePlace
from veomni_core.descriptions.kernel_spec import EXPERT_PARALLEL, KernelSpec
from veomni_core.sites.site import Kernel, Site
from veomni_transformers.changes.bypassed_children import with_children_as_proven
from veomni_transformers.changes.guard_change import GuardChange
from veomni_transformers.engine.engine_layout import EngineLayout
from veomni_transformers.engine.layout import refused
from veomni_transformers.experts.proof import WEIGHTS, prove_experts
from veomni_transformers.experts.selection import (
    EagerExpertsChange,
    ExpertsChange,
    is_dispatched,
    selected_implementation,
    table_of,
    with_implementation,
)
from veomni_transformers.forwards.adapted_experts import forward_beside_adapters, why_not_beside
from veomni_transformers.forwards.expert_layouts import LAYOUTS, ExpertLayout, dropping_choices, sizes_of
from veomni_transformers.forwards.peft_parameters import ACTIVATE, handing_factors, wrappers_of
from veomni_transformers.forwards.signatures import with_own_signature
from veomni_transformers.proving import probe
from veomni_transformers.proving.code_read import Places, module_at
from veomni_transformers.proving.code_reading import bypassed, guarded_names
from veomni_transformers.proving.module_locator import ModuleLocator, refuse_empty
from veomni_transformers.proving.proof import Proof

# Layouts whose forward passes each row's experts on. In the others a row's place in the input says which it is for.
_DIVISIBLE = {"as stored", "transposed"} | {name for name, layout in LAYOUTS.items() if layout.variant == "clamped"}
_DIVIDED_WIDTH = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}


class ExpertsModules(ModuleLocator):
    """Finds modules of experts, and replaces their ``forward`` by the forward of their weights' layout.

    A subclass with other ``layouts`` proves modules that keep their weights in those.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, vocab_size=64))
        >>> [site] = ExpertsModules().find(model, "experts")
        >>> site.path, site.variant, site.detail["layout"]
        ('model.layers.0.mlp.experts', 'standard', 'as stored')
        >>> class TransposedExperts(ExpertsModules):
        ...     layouts = {"transposed": LAYOUTS["transposed"]}
        >>> [site] = TransposedExperts().find(model, "experts")  # another layout is not mistaken for this one
        >>> site.variant is None
        True
    """

    op_name = "moe_experts"
    layouts: Mapping[str, ExpertLayout] = LAYOUTS

    def __init__(self) -> None:
        super().__init__()
        refuse_empty(self, "layouts", "name: ExpertLayout(variant, forward_with)")

    def is_candidate(self, module: nn.Module) -> bool:
        return all(weight is not None and weight.dim() == 3 for weight in _weights(module))

    def prove(self, module: nn.Module) -> Proof:
        return prove_experts(module, self.readings, self.layouts)

    def sizes(self, module: nn.Module) -> Mapping[str, tuple[int, ...]]:
        return sizes_of(*_weights(module))

    def own(self, module: nn.Module) -> str:
        return selected_implementation(module)

    def sharded(self, site: Site, layout: EngineLayout) -> Site:
        """A rank runs the kernel on its experts alone, or on its part of every expert's width."""
        styles = layout.styles_at(site.path)
        own = styles.pop("", "")
        if site.detail["layout"] not in _DIVISIBLE:
            return refused(site, {"": own, **styles}, f"experts kept {site.detail['layout']} can't be divided")
        if own == "ep_dispatch_experts" and set(styles.values()) == {"grouped_gemm"}:
            sizes = {**site.sizes, "experts": (site.sizes["experts"][0] // layout.ep,)}
            return replace(site, sizes=sizes, needs=(*site.needs, EXPERT_PARALLEL))
        width = site.sizes["intermediate"][0]
        if own == "moe_tp_experts" and styles == _DIVIDED_WIDTH and width % layout.tp == 0:
            return replace(site, sizes={**site.sizes, "intermediate": (width // layout.tp,)})
        return refused(site, {"": own, **styles}, "the kernel needs whole experts, or equal parts of gate, up and down")

    def key(self, module: nn.Module) -> Hashable:
        names = with_implementation(module, self.readings).names
        return probe.behaviour(module, names), selected_implementation(module)

    def code_read(self, model: nn.Module, site: Site) -> Places:
        """Also what transformers' table of experts has under the name that the config selects, and what that reads."""
        module = module_at(model, site.path)
        read, table, name = super().code_read(model, site), table_of(module), selected_implementation(module)
        if table is None or name not in table:
            return read
        known: dict[Hashable, Places] = vars(self).setdefault("_with_implementation", {})
        key = (id(read), name)
        if key not in known:
            called = self._places([(eager_class(type(module)), table[name])])
            known[key] = (*read, *called, CodePlace(table, name, f"the experts implementation {name!r}"))
        return known[key]

    def called(self, site: Site) -> tuple[str, ...]:
        return WEIGHTS

    def install(self, model: nn.Module, site: Site, kernel: Kernel, spec: KernelSpec) -> Iterable[Change]:
        module = module_at(model, site.path)
        reading = self.readings.of(module)
        layout = self.layouts[site.detail["layout"]]
        children = dict(bypassed(module, reading, WEIGHTS))
        bound = forward_beside_adapters(layout, kernel, spec)
        bound = with_children_as_proven(bound, type(module).forward, children)
        forward = with_own_signature(module, bound)  # type: ignore[arg-type]
        if EXPERT_PARALLEL in site.needs:
            forward = dropping_choices(forward)
        yield ExpertsChange(module, forward, guarded_names(module, with_implementation(module, self.readings), WEIGHTS))
        for _, wrapper in wrappers_of(module, model) if not why_not_beside(layout, spec) else ():
            yield ClassChange(wrapper, ACTIVATE, handing_factors(getattr(type(wrapper), ACTIVATE)))
        for name, child in children.items():
            yield GuardChange(module, name, child, guarded_names(child, self.readings.of(child)))

    def install_eager(self, model: nn.Module, site: Site) -> Iterable[Change]:
        module = module_at(model, site.path)
        if is_dispatched(module):
            yield EagerExpertsChange(module)


def _weights(module: nn.Module) -> list[Any]:
    return [module._parameters.get(name) for name in WEIGHTS[:2]]
