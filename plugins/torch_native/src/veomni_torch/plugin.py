"""Declares the kernels to veomni-core. Doesn't import torch."""

from veomni_core import KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

# Most fused kernels declare a higher preference, so `auto` takes these where no such kernel can run.
_PREFERENCE = 10


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """One kernel per op and variant, for any device."""
    return [
        KernelSpec(
            name="sdpa",
            op_name="attention",
            variant="standard",
            factory="veomni_torch.attention:sdpa",
            description="torch.nn.functional.scaled_dot_product_attention, as transformers calls it",
            preference=_PREFERENCE,
            deterministic=False,
            features=("dense_mask", "dropout", "position_bias", "wide_heads", "odd_heads", "sdpa_mask"),
        ),
        *(
            KernelSpec(
                name="torch",
                op_name="rms_norm",
                variant=variant,
                factory=f"veomni_torch.rms_norm:{variant}",
                description="saves its input and one number per row",
                preference=_PREFERENCE,
            )
            for variant in ("standard", "cast_after", "offset", "unweighted", "unweighted_rounded_scale")
        ),
        *(
            KernelSpec(
                name="torch",
                op_name="swiglu_mlp",
                variant=variant,
                factory=f"veomni_torch.swiglu_mlp:{variant}",
                description="saves only its inputs",
                preference=_PREFERENCE,
            )
            for variant in ("standard", "gelu_tanh", "gelu")
        ),
        KernelSpec(
            name="chunk_loss",
            op_name="cross_entropy_loss",
            variant="causal",
            factory="veomni_torch.cross_entropy_loss:causal",
            description="logits and their gradient for one chunk of tokens at a time",
            preference=_PREFERENCE,
        ),
        *(
            KernelSpec(
                name="grouped_mm",
                op_name="moe_experts",
                variant=variant,
                factory=f"veomni_torch.moe_experts:{variant}",
                description="tokens sorted by expert, one matrix product per expert and projection",
                preference=_PREFERENCE,
            )
            for variant in ("standard", "clamped")
        ),
        *(
            KernelSpec(
                name="torch",
                op_name="load_balancing_loss",
                variant=variant,
                factory=f"veomni_torch.load_balancing_loss:{variant}",
                description="one pass per layer, without a one-hot tensor",
                preference=_PREFERENCE,
            )
            for variant in ("standard", "product_keys", "given_routes")
        ),
    ]
