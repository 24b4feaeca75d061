"""Registers the kernels with veomni-core. Imports neither torch nor triton."""

from collections.abc import Iterable

from veomni_core import HardwareRequirement, KernelOption, KernelSpec, Suspicion, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

_TRITON = ("triton>=3.6",)
_AMD = HardwareRequirement("rocm", packages=_TRITON)
_GPU = HardwareRequirement("cuda", min_compute_capability=70, packages=_TRITON) | _AMD
# For NVIDIA's GPUs before these Triton computes products one by one, and spills about 10 KB a thread.
_MATRIX_UNITS = HardwareRequirement("cuda", min_compute_capability=80, packages=_TRITON) | _AMD
# Tiles of sparse attention take the shared memory of these; in small ones it was not timed.
_SM90 = HardwareRequirement("cuda", min_compute_capability=90, packages=_TRITON) | _AMD
# They compile for AMD's GPUs, which is tested, and nobody has run them there.
_NEVER_RUN = (Suspicion(_AMD, "it was never run on an AMD GPU", seen=False),)
_PREFERENCE = 60
_INDEXER_LOSS = KernelOption(
    "indexer_loss",
    0.0,
    minimum=0,
    description="weight, beside the model's loss, of the loss that the indexer learns from; 0: it doesn't learn",
)
_KEPT_MIB = KernelOption(
    "kept_mib", 512, minimum=0, description="MiB of logits kept for backward, which computes the others again"
)


def _kernels(op_name: str, variants: Iterable[str], description: str) -> tuple[KernelSpec, ...]:
    return KernelSpec.for_variants(
        variants,
        name="triton",
        op_name=op_name,
        factory=f"veomni_triton.{op_name}:{{variant}}",
        hardware=_GPU,
        suspicions=_NEVER_RUN,
        description=description,
        preference=_PREFERENCE,
        batch_invariant=True,
    )


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """Every kernel. But for sparse attention's gradients of keys, each gives the same bits on every run."""
    norms = ("standard", "cast_after", "offset", "unweighted", "unweighted_rounded_scale")
    rotations = (
        *("full", "partial", "sign_flipped", "half_width", "pairwise", "pairwise_partial"),
        *("interleaved", "interleaved_partial", "deinterleaved", "single", "single_tail"),
    )
    return [
        *_kernels("rms_norm", norms, "batch-invariant: a row's result depends on that row alone"),
        *_kernels(
            "rms_norm_gated",
            ("standard", "sigmoid", "gate_first"),
            "one pass each way, whole rows or groups of them; batch-invariant",
        ),
        *_kernels("rotary_pos_emb", rotations, "one pass over queries and keys, not in place"),
        *_kernels(
            "rotary_pos_emb_vision",
            ("full", "partial", "pairwise"),
            "one pass over queries and keys, not in place; in float32",
        ),
        *_kernels("swiglu_mlp", ("standard", "gelu", "gelu_tanh"), "one pass each way; saves only its inputs"),
        KernelSpec(
            name="triton",
            op_name="linear",
            variant="standard",
            factory="veomni_triton.linear:standard",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="tiles that each sum along the whole width; torch's products in backward",
            preference=_PREFERENCE,
            batch_invariant=True,
        ),
        KernelSpec(
            name="triton",
            op_name="attention",
            variant="standard",
            factory="veomni_triton.attention:attention",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="batch-invariant: blocks of keys are counted from the first one that a query sees",
            preference=0,  # on request: others are faster
            features=(
                *("dense_mask", "sliding_window", "packed", "softcap", "softcap_by_lengths", "sinks"),
                "odd_heads",
            ),
            # As for eager attention, which hides what that hides, in any model.
            mask="transformers.masking_utils:eager_mask",
            batch_invariant=True,
        ),
        KernelSpec(
            name="triton",
            op_name="chunk_gated_delta_rule",
            variant="standard",
            factory="veomni_triton.chunk_gated_delta_rule:standard",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="chunks of 64 tokens on matrix units; saves only its inputs",
            preference=_PREFERENCE,
            can_run="veomni_triton.limits:chunk_gated_delta_rule",
            features=("wide_heads",),
        ),
        KernelSpec(
            name="triton_fixed_order",
            op_name="chunk_gated_delta_rule",
            variant="standard",
            factory="veomni_triton.chunk_gated_delta_rule:standard_in_fixed_order",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="batch-invariant: token by token, with the state in registers; triton's backward",
            preference=0,  # on request: slower
            can_run="veomni_triton.limits:chunk_gated_delta_rule",
            features=("wide_heads",),
            batch_invariant=True,
        ),
        KernelSpec(
            name="triton",
            op_name="mamba2_scan",
            variant="standard",
            factory="veomni_triton.mamba2_scan:standard",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="chunks of tokens on matrix units; saves only its inputs",
            preference=_PREFERENCE,
        ),
        KernelSpec(
            name="triton",
            op_name="selective_scan",
            variant="standard",
            factory="veomni_triton.selective_scan:standard",
            hardware=_GPU,
            suspicions=_NEVER_RUN,
            description="channels in parallel, states in registers; saves its inputs and a state per 64 tokens",
            preference=_PREFERENCE,
        ),
        KernelSpec(
            name="triton",
            op_name="dsa_indexer",
            variant="standard",
            factory="veomni_triton.dsa_indexer:standard",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="scores on matrix units, of a block of queries at a time; the least chosen one by its bits",
            preference=0,  # on request: at 4096 tokens dense attention with a mask is faster
        ),
        KernelSpec(
            name="triton",
            op_name="dsa_attention",
            variant="standard",
            factory="veomni_triton.dsa_attention:made",
            hardware=_SM90,
            suspicions=_NEVER_RUN,
            description="gathers each query's keys once for many heads, on matrix units",
            preference=0,  # on request: at 4096 tokens dense attention with a mask is faster
            deterministic=False,  # gradients of keys are added by atomics
            features=("indexer_loss",),
            options=(_INDEXER_LOSS,),
        ),
        KernelSpec(
            name="native-sparse",
            op_name="attention",
            variant="native_sparse",
            factory="veomni_triton.native_sparse:native_sparse",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="a query's heads of a key head at a time; gradients of a block's keys from those that chose it",
            preference=0,  # on request: not timed yet
        ),
        KernelSpec(
            name="triton",
            op_name="causal_conv1d",
            variant="standard",
            factory="veomni_triton.causal_conv1d:standard",
            hardware=_GPU,
            suspicions=_NEVER_RUN,
            description="fused with bias and activation, one pass each way along channels or positions",
            preference=_PREFERENCE,
            features=("any_width",),
            batch_invariant=True,
        ),
        KernelSpec(
            name="triton",
            op_name="token_logprobs",
            variant="causal",
            factory="veomni_triton.token_logprobs:causal",
            hardware=_GPU,
            suspicions=_NEVER_RUN,
            description="one pass over each tile of logits; as many of them kept for backward as asked",
            preference=_PREFERENCE,
            features=("top1", "mean_logit", "log_sum_squares"),
            options=(_KEPT_MIB,),
        ),
        KernelSpec(
            name="triton_fixed_order",
            op_name="token_logprobs",
            variant="causal",
            factory="veomni_triton.token_logprobs:causal_in_fixed_order",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="batch-invariant: triton, with linear's products",
            preference=0,  # on request: slower
            features=("top1", "mean_logit", "log_sum_squares"),
            options=(_KEPT_MIB,),
            batch_invariant=True,
        ),
        KernelSpec(
            name="triton_fixed_order",
            op_name="cross_entropy_loss",
            variant="causal",
            factory="veomni_triton.cross_entropy_loss:causal",
            hardware=_MATRIX_UNITS,
            suspicions=_NEVER_RUN,
            description="batch-invariant: linear's products, for one chunk of tokens at a time",
            preference=0,  # on request: slower
            batch_invariant=True,
        ),
    ]
