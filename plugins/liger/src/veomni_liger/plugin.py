"""Declares the kernels to veomni-core. Imports neither torch nor Liger."""

from collections.abc import Iterable

from veomni_core import HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

# 0.8.5 is the first release that rotates part of a head, and the only one that was tested. The plugin calls functions
# below Liger's autograd functions, which are not a stable API, so the next minor version is excluded until tested.
_LIBRARY = "liger-kernel>=0.8.5,<0.9"
# Liger also runs on ROCm and XPU, and has separate kernels for Ascend. None of these was tested, so none is declared.
_GPU = HardwareRequirement("cuda", min_compute_capability=80, packages=(_LIBRARY,))
# Ranked among all plugins by docs/benchmarks on an H200: the loss (head) first; the row-wise kernels behind those of
# veomni-triton and QuACK; the experts behind veomni-torch's grouped_mm (10).
_HEAD, _ROWS, _EXPERTS = 60, 40, 5


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """Liger's kernels, each for the variants that it computes exactly."""
    norms = ("standard", "cast_after", "offset", "unweighted")
    return [
        *_kernels("liger_kernel", "rms_norm", norms, _ROWS, "one pass forward and one backward, not in place"),
        *_kernels(
            "liger_kernel",
            "rotary_pos_emb",
            ("full", "partial", "half_width"),
            _ROWS,
            "Liger's in-place rotation, on a copy",
        ),
        *_kernels("liger_kernel", "swiglu_mlp", ("standard", "gelu_tanh"), _ROWS, "saves only its inputs"),
        *_kernels("liger_kernel", "cross_entropy_loss", ("causal",), _HEAD, "one chunk of tokens at a time"),
        *_kernels("liger_kernel", "cross_entropy_loss", ("seq_cls",), _HEAD, "in float32, on a copy of the logits"),
        KernelSpec(
            name="fused_liger",
            op_name="moe_experts",
            variant="standard",
            factory="veomni_liger.moe_experts:standard",
            hardware=_GPU,
            description="gather, GEMM and activation in one kernel, with pinned configurations",
            preference=_EXPERTS,
            deterministic=False,  # the routing weights' gradients are summed by atomics
            dtypes=("bfloat16", "float16"),  # float32 is multiplied as TF32, which misses the contract
        ),
    ]


def _kernels(
    name: str, op_name: str, variants: Iterable[str], preference: int, description: str
) -> tuple[KernelSpec, ...]:
    return KernelSpec.for_variants(
        variants,
        name=name,
        op_name=op_name,
        factory=f"veomni_liger.{op_name}:{{variant}}",
        hardware=_GPU,
        description=description,
        expert_parallel=op_name == "moe_experts",
        preference=preference,
    )
