"""The core's own ops and rules, described through the hooks that plugins use."""

from __future__ import annotations

from veomni_core.descriptions.hookspecs import hookimpl
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.descriptions.spec import ModelRule, ModelViewSpec, SiteRule
from veomni_core.ops.catalog import BUILTIN_OPS, BUILTIN_SITE_RULES

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_ops() -> tuple[OpSpec, ...]:
    return BUILTIN_OPS


@hookimpl
def veomni_sites() -> tuple[SiteRule, ...]:
    return BUILTIN_SITE_RULES


@hookimpl
def veomni_model_rules() -> list[ModelRule]:
    return [
        ModelRule("no hub kernels", "veomni_core.binding.hub_kernels:NoHubKernels", order=-10),
        ModelRule("packed steps", "veomni_core.binding.packed_steps:PackedSteps"),
    ]


@hookimpl
def veomni_model_views() -> list[ModelViewSpec]:
    return [ModelViewSpec("transformers", "veomni_core.sites.engine.model_view:TransformersView")]
