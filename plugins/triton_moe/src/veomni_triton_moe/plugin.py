"""Registers the kernels with veomni-core. Imports neither torch nor triton."""

from veomni_core import HardwareRequirement, KernelOption, KernelSpec, Suspicion, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

_TRITON = ("triton>=3.6",)
_AMD = HardwareRequirement("rocm", packages=_TRITON)
_GPU = HardwareRequirement("cuda", min_compute_capability=70, packages=_TRITON) | _AMD
# For NVIDIA's GPUs before these Triton computes products one by one, and spills about 10 KB a thread.
_MATRIX_UNITS = HardwareRequirement("cuda", min_compute_capability=80, packages=_TRITON) | _AMD
# They compile for AMD's GPUs, which is tested, and nobody has run them there.
_NEVER_RUN = (Suspicion(_AMD, "it was never run on an AMD GPU", seen=False),)
# triton-ascend is a Triton for NPUs. Its 3.2 lacks what the loss needs of Triton 3.4: tuples of pointers, and knobs.
_ASCEND = HardwareRequirement("npu", packages=("triton-ascend>=3.4",))
_NEVER_ON_AN_NPU = Suspicion(_ASCEND, "it was never run by triton-ascend", seen=False)
_PREFERENCE = 60
_MAX_TOKENS = KernelOption(
    "max_tokens", 0, minimum=0, description="rows from each rank to each other one; 0: as many as there are, counted"
)


def _experts(
    name: str,
    variant: str,
    function: str,
    description: str,
    preference: int = 0,
    expert_parallel: bool = True,
    batch_invariant: bool = False,
) -> KernelSpec:
    """A form with a trade-off has preference 0: it is only used if it is requested by name."""
    return KernelSpec(
        name=name,
        op_name="moe_experts",
        variant=variant,
        factory=f"veomni_triton_moe.moe_experts:{function}",
        hardware=_MATRIX_UNITS,
        suspicions=_NEVER_RUN,
        description=description,
        expert_parallel=expert_parallel,
        preference=preference,
        features=("lora",),
        batch_invariant=batch_invariant,
    )


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """Every kernel, deterministic in forward and backward."""
    plain = "gather, product and activation in one"
    fixed = "batch-invariant: fused_triton, with the same tiles for few rows and for many"
    return [
        _experts("fused_triton", "standard", "standard", plain, _PREFERENCE),
        _experts("fused_triton", "clamped", "clamped", plain, _PREFERENCE),
        _experts(
            "fused_triton_recompute",
            "standard",
            "standard_recomputing",
            "fused_triton, with the pre-activations computed anew in backward",
        ),
        _experts(
            "fused_triton_accumulate",
            "standard",
            "standard_accumulating",
            "fused_triton, adding the weights' gradients in place to earlier ones",
            expert_parallel=False,  # it needs weights that are leaves
        ),
        _experts("fused_triton_fixed_order", "standard", "standard_in_fixed_order", fixed, batch_invariant=True),
        _experts("fused_triton_fixed_order", "clamped", "clamped_in_fixed_order", fixed, batch_invariant=True),
        KernelSpec(
            name="triton",
            op_name="load_balancing_loss",
            variant="standard",
            factory="veomni_triton_moe.load_balancing_loss:standard",
            hardware=_GPU | _ASCEND,
            suspicions=(*_NEVER_RUN, _NEVER_ON_AN_NPU),
            description="softmax, top-k and sums in one pass per layer",
            preference=_PREFERENCE,
            can_run="veomni_triton_moe.limits:load_balancing_loss",
        ),
        KernelSpec(
            name="alltoall_dedup",
            op_name="token_dispatch",
            variant="exchanged",
            factory="veomni_triton_moe.token_dispatch:alltoall_dedup",
            description="one row per token and rank, summed over experts before the way back; on any device",
            preference=_PREFERENCE,
            options=(_MAX_TOKENS,),
        ),
    ]
