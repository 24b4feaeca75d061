"""What this distribution registers."""

from __future__ import annotations

from veomni_core import KernelSpec, OpSpec, SiteRule, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_ops() -> list[OpSpec]:
    return [
        OpSpec(
            name="gelu",
            variants=("tanh",),
            config_field="gelu_implementation",
            contract="acme_gelu.contract:CONTRACTS",
            description="the Gaussian error linear unit, approximated by tanh",
        )
    ]


@hookimpl
def veomni_sites() -> list[SiteRule]:
    return [SiteRule("GELU modules", "acme_gelu.sites:GeluModules")]


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    return [KernelSpec("fused", "gelu", "tanh", "acme_gelu.gelu:fused", description="one pass; saves only its input")]
