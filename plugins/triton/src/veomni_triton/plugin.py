"""Registers the kernels with veomni-core. Imports neither torch nor triton."""

from collections.abc import Iterable

from veomni_core import HardwareRequirement, KernelOption, KernelSpec, Suspicion, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

_TRITON = ("triton>=3.6",)
_AMD = HardwareRequirement("rocm", packages=_TRITON)
_GPU = HardwareRequirement("cuda", min_compute_capability=70, packages=_TRITON) | _AMD
# For NVIDIA's GPUs before these Triton computes products one by one, and spills about 10 KB a thread.
_MATRIX_UNITS = HardwareRequirement("cuda", min_compute_capability=80, packages=_TRITON) | _AMD
_PRODUCTS = ("moe_experts", "chunk_gated_delta_rule")
# They compile for AMD's GPUs, which is tested, and nobody has run them there.
_NEVER_RUN = (Suspicion(_AMD, "it was never run on an AMD GPU", seen=False),)
_PREFERENCE = 60
_FEATURES = {"moe_experts": ("lora",), "chunk_gated_delta_rule": ("wide_heads",)}
_MAX_TOKENS = KernelOption(
    "max_tokens", 0, minimum=0, description="rows from each rank to each other one; 0: as many as there are, counted"
)
_KEPT_MIB = KernelOption(
    "kept_mib", 512, minimum=0, description="MiB of logits kept for backward, which computes the others again"
)


def _kernels(
    name: str, op_name: str, variants: Iterable[str], description: str, can_run: str = ""
) -> tuple[KernelSpec, ...]:
    return KernelSpec.for_variants(
        variants,
        name=name,
        op_name=op_name,
        factory=f"veomni_triton.{op_name}:{{variant}}",
        hardware=_MATRIX_UNITS if op_name in _PRODUCTS else _GPU,
        suspicions=_NEVER_RUN,
        description=description,
        expert_parallel=op_name == "moe_experts",
        preference=_PREFERENCE,
        can_run=can_run,
        features=_FEATURES.get(op_name, ()),
        batch_invariant=op_name in ("rms_norm", "rms_norm_gated"),
    )


def _asked_for(suffix: str, kernel: str, description: str) -> KernelSpec:
    """A form of ``fused_triton`` with a trade-off, which is only used if it is requested by name (preference 0)."""
    return KernelSpec(
        name=f"fused_triton_{suffix}",
        op_name="moe_experts",
        variant="standard",
        factory=f"veomni_triton.moe_experts:{kernel}",
        hardware=_MATRIX_UNITS,
        suspicions=_NEVER_RUN,
        description=f"fused_triton, {description}",
        expert_parallel=kernel == "standard_recomputing",  # the other one needs weights that are leaves
        preference=0,
        features=_FEATURES["moe_experts"],
    )


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """Every kernel, deterministic in forward and backward."""
    norms = ("standard", "cast_after", "offset", "unweighted", "unweighted_rounded_scale")
    rotations = (
        *("full", "partial", "sign_flipped", "half_width", "pairwise", "pairwise_partial"),
        *("interleaved", "interleaved_partial", "deinterleaved", "single", "single_tail"),
    )
    return [
        *_kernels("fused_triton", "moe_experts", ("standard", "clamped"), "gather, product and activation in one"),
        _asked_for("recompute", "standard_recomputing", "with the pre-activations computed anew in backward"),
        _asked_for("accumulate", "standard_accumulating", "adding the weights' gradients in place to earlier ones"),
        *_kernels("triton", "rms_norm", norms, "batch-invariant: a row's result depends on that row alone"),
        *_kernels(
            "triton",
            "rms_norm_gated",
            ("standard", "sigmoid", "gate_first"),
            "one pass each way, whole rows or groups of them; batch-invariant",
        ),
        *_kernels("triton", "rotary_pos_emb", rotations, "one pass over queries and keys, not in place"),
        *_kernels(
            "triton",
            "rotary_pos_emb_vision",
            ("full", "partial", "pairwise"),
            "one pass over queries and keys, not in place; in float32",
        ),
        *_kernels(
            "triton", "swiglu_mlp", ("standard", "gelu", "gelu_tanh"), "one pass each way; saves only its inputs"
        ),
        *_kernels(
            "triton",
            "load_balancing_loss",
            ("standard",),
            "softmax, top-k and sums in one pass per layer",
            can_run="veomni_triton.limits:load_balancing_loss",
        ),
        *_kernels(
            "triton",
            "chunk_gated_delta_rule",
            ("standard",),
            "chunks of 64 tokens on matrix units; saves only its inputs",
            can_run="veomni_triton.limits:chunk_gated_delta_rule",
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
            name="alltoall_dedup",
            op_name="token_dispatch",
            variant="exchanged",
            factory="veomni_triton.token_dispatch:alltoall_dedup",
            description="one row per token and rank, summed over experts before the way back; on any device",
            preference=_PREFERENCE,
            options=(_MAX_TOKENS,),
        ),
    ]
