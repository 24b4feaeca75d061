"""Describes the kernels to veomni-core. Imports neither torch nor Liger."""

from collections.abc import Iterable

from veomni_core import HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

# 0.8.5 is the first that rotates part of a head, and the only one that was tested. Below its autograd functions the
# library promises no stable calls, so its next minor version waits until it was tested.
_LIBRARY = "liger-kernel>=0.8.5,<0.9"
# Liger runs on ROCm and XPU too, and has kernels of its own for Ascend. None of that was tried, so none is declared.
_GPU = HardwareRequirement("cuda", min_compute_capability=80, packages=(_LIBRARY,))
# Ranked by docs/benchmarks on an H200, among all plugins: the head first, rows behind veomni-triton-moe's and QuACK's,
# the experts behind veomni-torch's products (10).
_HEAD, _ROWS, _EXPERTS = 60, 40, 5


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """Every kernel of the library that computes a variant exactly."""
    norms = ("standard", "cast_after", "offset", "unweighted")
    return [
        *_kernels("liger_kernel", "rms_norm", norms, _ROWS, "one pass forward and one backward, not in place"),
        *_kernels("liger_kernel", "rotary_pos_emb", ("full", "partial", "half_width"), _ROWS, "in place, on a copy"),
        *_kernels("liger_kernel", "swiglu_mlp", ("standard", "gelu_tanh"), _ROWS, "saves only its inputs"),
        *_kernels("liger_kernel", "cross_entropy_loss", ("causal",), _HEAD, "one chunk of tokens at a time"),
        *_kernels("liger_kernel", "cross_entropy_loss", ("seq_cls",), _HEAD, "in float32, on a copy of the logits"),
        KernelSpec(
            name="fused_liger",
            op_name="moe_experts",
            variant="standard",
            factory="veomni_liger.moe_experts:standard",
            hardware=_GPU,
            description="gather, product and activation in one, in pinned configurations",
            preference=_EXPERTS,
            deterministic=False,  # the routing weights' gradients are summed by atomics
            dtypes=("bfloat16", "float16"),  # float32 is multiplied as TF32, which misses the contract
        ),
    ]


def _kernels(name: str, op_name: str, variants: Iterable[str], preference: int, description: str) -> list[KernelSpec]:
    return [
        KernelSpec(
            name=name,
            op_name=op_name,
            variant=variant,
            factory=f"veomni_liger.{op_name}:{variant}",
            hardware=_GPU,
            description=description,
            preference=preference,
        )
        for variant in variants
    ]
