"""What this distribution registers."""

from __future__ import annotations

from veomni_core import HardwareRequirement, KernelOption, KernelSpec, SiteRule, VariantSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1
_ANYWHERE = HardwareRequirement("cpu") | HardwareRequirement("cuda") | HardwareRequirement("rocm")
_KEEP = KernelOption("keep", "normalised", choices=("normalised", "inputs"), description="what backward reads")


@hookimpl
def veomni_variants() -> list[VariantSpec]:
    return [VariantSpec("rms_norm", "log_weight", "acme_extensions.rms_norm:CONTRACT")]


@hookimpl
def veomni_sites() -> list[SiteRule]:
    return [
        SiteRule("norms with logarithmic weights", "acme_extensions.rms_norm:LogWeightNorms"),
        SiteRule("experts with up before gate", "acme_extensions.moe_experts:UpFirstExperts"),
    ]


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    return [
        KernelSpec(
            name="acme",
            op_name="rms_norm",
            variant="log_weight",
            factory="acme_extensions.rms_norm:factory",
            hardware=_ANYWHERE,
            options=(_KEEP,),
        ),
        KernelSpec(
            name="acme",
            op_name="moe_experts",
            variant="standard",
            factory="acme_extensions.moe_experts:kernel",
            hardware=_ANYWHERE,
            can_run="acme_extensions.limits:moe_experts",
        ),
        KernelSpec(
            name="acme",
            op_name="attention",
            variant="standard",
            factory="acme_extensions.attention:kernel",
            hardware=_ANYWHERE,
            features=("wide_heads", "odd_heads"),
            mask="acme_extensions.attention:hidden_pairs",
        ),
        KernelSpec(
            name="acme",
            op_name="token_dispatch",
            variant="exchanged",
            factory="acme_extensions.token_dispatch:kernel",
            hardware=_ANYWHERE,
        ),
    ]
