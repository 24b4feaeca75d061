"""Describes the kernels to veomni-core. Imports neither torch nor quack."""

from collections.abc import Iterable

from veomni_core import HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1


def _hopper(*packages: str) -> HardwareRequirement:
    return HardwareRequirement("cuda", min_compute_capability=90, packages=packages)


# Two versions of QuACK, each with the compilers that it can be imported with: 0.4 needs names that nvidia-cutlass-dsl
# 4.6 took away, and 0.6.5 needs names of 4.7. What is between is not supported: 0.5 changed cross_entropy_fwd_out,
# 0.6.2 the gated products, and most of these versions ask for one version of the compiler.
_HOPPER = _hopper("quack-kernels>=0.6.5,<0.7", "nvidia-cutlass-dsl>=4.7") | _hopper(
    "quack-kernels>=0.4,<0.5", "nvidia-cutlass-dsl>=4.4.2,<4.6"
)
_HALF = ("bfloat16", "float16")
_ALL = ("float32", *_HALF)


def _kernels(
    name: str, module: str, variants: Iterable[str], description: str, preference: int, dtypes: tuple[str, ...] = _ALL
) -> tuple[KernelSpec, ...]:
    op_name, _, _ = module.partition(".")
    return KernelSpec.for_variants(
        variants,
        name=name,
        op_name=op_name,
        factory=f"veomni_quack.{module}:{{variant}}",
        hardware=_HOPPER,
        description=description,
        preference=preference,
        dtypes=dtypes,
        expert_parallel=op_name == "moe_experts",
    )


_ROTATIONS = (
    "full",
    "partial",
    "sign_flipped",
    "half_width",
    "pairwise",
    "pairwise_partial",
    "interleaved",
    "interleaved_partial",
    "single",
)


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """All kernels. Each is deterministic in forward and backward."""
    return [
        *_kernels(
            "quack", "rms_norm", ("cast_after", "offset", "unweighted"), "one kernel forward and one backward", 50
        ),
        *_kernels("quack", "rms_norm", ("standard",), "QuACK's norm, then a separate pass for the weight", 40),
        *_kernels("quack", "rotary_pos_emb", _ROTATIONS, "one pass per tensor, not in place", 50),
        *_kernels(
            "quack",
            "cross_entropy_loss.kernel",
            ("causal",),
            "logits and their gradient for one chunk of tokens at a time",
            50,
            _HALF,
        ),
        *_kernels(
            "fused_quack",
            "moe_experts.kernel",
            ("standard",),
            "gather and SwiGLU inside the grouped GEMMs",
            55,
            _HALF,
        ),
    ]
