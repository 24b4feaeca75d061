"""Declares the kernels to veomni-core. Doesn't import torch."""

from collections.abc import Iterable

from veomni_core import HardwareRequirement, KernelOption, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

# Most fused kernels declare a higher preference, so `auto` takes these where no such kernel can run.
_PREFERENCE = 10
_INDEXER_LOSS = KernelOption(
    "indexer_loss",
    0.0,
    minimum=0,
    description="weight, beside the model's loss, of the loss that the indexer learns from; 0: it doesn't learn",
)
_INDEXER_STAGE = KernelOption(
    "indexer_stage",
    "sparse",
    choices=("sparse", "dense"),
    description="dense: attention and the indexer's loss are over all keys, as an indexer warms up, the rest frozen",
)


def _in_fixed_order(
    op_name: str, variants: Iterable[str], factory: str, features: tuple[str, ...] = (), mask: str = ""
) -> tuple[KernelSpec, ...]:
    """Kernels whose sums have an order that no batch changes; on CPUs, where others are faster."""
    return KernelSpec.for_variants(
        variants,
        name="fixed_order",
        op_name=op_name,
        factory=f"veomni_torch.{factory}",
        hardware=HardwareRequirement("cpu"),
        description="batch-invariant: a row's bits depend on that row alone",
        preference=0,
        features=features,
        mask=mask,
        batch_invariant=True,
    )


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """One kernel per op and variant, for any device."""
    norms = ("standard", "cast_after", "offset", "unweighted", "unweighted_rounded_scale")
    seen = (
        "dense_mask",
        "sliding_window",
        "packed",
        "softcap",
        "softcap_by_lengths",
        "sinks",
        "wide_heads",
        "odd_heads",
    )
    return [
        *_in_fixed_order("linear", ("standard",), "linear:{variant}"),
        # In eager attention's place with its masks, which hide what that hides, in any model.
        *_in_fixed_order(
            "attention",
            ("standard",),
            "attention_in_fixed_order:attention",
            seen,
            mask="transformers.masking_utils:eager_mask",
        ),
        *_in_fixed_order("rms_norm", norms, "rms_norm:{variant}"),
        *_in_fixed_order("rms_norm_gated", ("standard", "sigmoid", "gate_first"), "rms_norm_gated:{variant}"),
        *_in_fixed_order("causal_conv1d", ("standard",), "causal_conv1d:{variant}", ("any_width",)),
        *(
            each
            for op_name in ("chunk_gated_delta_rule", "kda")
            for each in _in_fixed_order(
                op_name, ("standard",), f"{op_name}:{{variant}}_in_fixed_order", ("wide_heads",)
            )
        ),
        *_in_fixed_order("moe_experts", ("standard", "clamped"), "moe_experts:{variant}_in_fixed_order"),
        *_in_fixed_order(
            "token_logprobs",
            ("causal",),
            "token_logprobs:{variant}_in_fixed_order",
            ("top1", "mean_logit", "log_sum_squares"),
        ),
        *_in_fixed_order("cross_entropy_loss", ("causal",), "cross_entropy_loss:{variant}_in_fixed_order"),
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
        KernelSpec(
            name="torch",
            op_name="attention",
            variant="native_sparse",
            factory="veomni_torch.native_sparse:native_sparse",
            description="a block of queries at a time, and again in backward; saves its inputs and the choice",
            preference=0,  # on request, as veomni-triton's
            deterministic=False,  # on a GPU gradients of keys are added in any order
        ),
        *KernelSpec.for_variants(
            norms,
            name="torch",
            op_name="rms_norm",
            factory="veomni_torch.rms_norm:{variant}",
            description="saves its input and one number per row",
            preference=_PREFERENCE,
        ),
        *KernelSpec.for_variants(
            ("standard", "sigmoid", "gate_first"),
            name="torch",
            op_name="rms_norm_gated",
            factory="veomni_torch.rms_norm_gated:{variant}",
            description="saves its inputs and one number per group",
            preference=_PREFERENCE,
        ),
        *KernelSpec.for_variants(
            ("standard", "gelu_tanh", "gelu"),
            name="torch",
            op_name="swiglu_mlp",
            factory="veomni_torch.swiglu_mlp:{variant}",
            description="saves only its inputs",
            preference=_PREFERENCE,
            fullgraph=True,
            batch_invariant=True,
        ),
        KernelSpec(
            name="torch",
            op_name="causal_conv1d",
            variant="standard",
            factory="veomni_torch.causal_conv1d:standard",
            description="shifted products of one tile of positions at a time, and again in backward",
            preference=_PREFERENCE,
            features=("any_width",),
        ),
        KernelSpec(
            name="chunk_loss",
            op_name="cross_entropy_loss",
            variant="causal",
            factory="veomni_torch.cross_entropy_loss:causal",
            description="logits and their gradient for one chunk of tokens at a time",
            preference=_PREFERENCE,
        ),
        KernelSpec(
            name="chunk_loss",
            op_name="cross_entropy_loss",
            variant="vocabulary_parallel",
            factory="veomni_torch.vocabulary_parallel_loss:vocabulary_parallel",
            description="one chunk of tokens at a time, and again in backward",
            preference=_PREFERENCE,
        ),
        KernelSpec(
            name="chunk_logprobs",
            op_name="token_logprobs",
            variant="causal",
            factory="veomni_torch.token_logprobs:causal",
            description="one tile of logits at a time, and again in backward",
            preference=_PREFERENCE,
            features=("top1", "mean_logit", "log_sum_squares"),
        ),
        KernelSpec(
            name="chunked_delta",
            op_name="chunk_gated_delta_rule",
            variant="standard",
            factory="veomni_torch.chunk_gated_delta_rule:standard",
            description="64 tokens at a time, and again in backward; saves its inputs and a state per 64 tokens",
            preference=_PREFERENCE,
            features=("wide_heads",),
        ),
        KernelSpec(
            name="chunked_kda",
            op_name="kda",
            variant="standard",
            factory="veomni_torch.kda:standard",
            description="64 tokens at a time, and again in backward; saves its inputs and a state per 64 tokens",
            preference=_PREFERENCE,
            features=("wide_heads",),
        ),
        KernelSpec(
            name="chunked_scan",
            op_name="mamba2_scan",
            variant="standard",
            factory="veomni_torch.mamba2_scan:standard",
            description="a few chunks of 64 tokens at a time, and again in backward; saves its inputs and few states",
            preference=_PREFERENCE,
        ),
        KernelSpec(
            name="chunked_scan",
            op_name="selective_scan",
            variant="standard",
            factory="veomni_torch.selective_scan:standard",
            description="a group of tokens at a time, and again in backward; saves its inputs and few states",
            preference=_PREFERENCE,
        ),
        KernelSpec(
            name="torch",
            op_name="dsa_indexer",
            variant="standard",
            factory="veomni_torch.dsa_indexer:standard",
            description="the scores of a block of queries at a time",
            preference=0,  # on request: slower than dense attention so far
        ),
        KernelSpec(
            name="torch",
            op_name="dsa_attention",
            variant="standard",
            factory="veomni_torch.dsa_attention:made",
            description="gathers the keys of a block of queries at a time, and again in backward; saves its inputs",
            preference=0,  # on request: slower than dense attention so far
            deterministic=False,  # on a GPU gradients of keys are added in any order
            features=("indexer_loss", "dense_stage"),
            options=(_INDEXER_LOSS, _INDEXER_STAGE),
        ),
        *KernelSpec.for_variants(
            ("standard", "clamped"),
            name="grouped_mm",
            op_name="moe_experts",
            factory="veomni_torch.moe_experts:{variant}",
            description="tokens sorted by expert, one matrix product per expert and projection",
            expert_parallel=True,
            preference=_PREFERENCE,
            features=("lora",),
        ),
        *KernelSpec.for_variants(
            ("standard", "product_keys", "given_routes"),
            name="torch",
            op_name="load_balancing_loss",
            factory="veomni_torch.load_balancing_loss:{variant}",
            description="one pass per layer, without a one-hot tensor",
            preference=_PREFERENCE,
        ),
    ]
