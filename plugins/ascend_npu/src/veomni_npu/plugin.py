"""Declares the kernels and the device to veomni-core. Imports neither torch nor torch_npu."""

from collections.abc import Iterable

from veomni_core import DeviceSpec, Hardware, HardwareRequirement, KernelSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1

_NPU = HardwareRequirement("npu", packages=("torch-npu>=2.9",))
_PREFERENCE = 60
_FEATURES = ("dense_mask", "dropout", "packed", "wide_heads", "odd_heads", "sdpa_mask")
_PRESET = {
    "attn_implementation": "npu_fusion_attention",
    "cross_entropy_loss_implementation": "npu",
    "moe_implementation": "fused_npu",
    "rms_norm_gated_implementation": "npu",
    "rms_norm_implementation": "npu",
    "rotary_pos_emb_implementation": "npu",
    "rotary_pos_emb_vision_implementation": "npu",
    "swiglu_mlp_implementation": "npu",
}


@hookimpl
def veomni_devices() -> list[DeviceSpec]:
    """The device type ``npu``, with the training NPUs of two generations by name, and ``preset: npu``."""
    named = {
        "ascend-910b": Hardware("npu", name="Ascend 910B"),
        "ascend-910_93": Hardware("npu", name="Ascend 910_93"),
    }
    return [DeviceSpec("npu", "veomni_npu.device:detect", named, _PRESET)]


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """The kernels, which call torch_npu's operators; the kernels' docstrings state the operators' documented limits."""
    norms = ("standard", "cast_after", "offset", "unweighted")
    return [
        # CANN documents aclnnRmsNormGrad as not deterministic by default. For attention it promises nothing.
        *_kernels("npu", "rms_norm", norms, "npu_rms_norm", deterministic=False),
        *_kernels(
            "npu",
            "rms_norm_gated",
            ("standard", "sigmoid", "gate_first"),
            "npu_rms_norm each way; saves its inputs and one number per group",
            deterministic=False,
        ),
        *_kernels("npu", "rotary_pos_emb", ("full", "partial"), "npu_rotary_mul; saves only cos and sin"),
        *_kernels("npu", "rotary_pos_emb_vision", ("full",), "npu_rotary_mul in float32; saves only cos and sin"),
        *_kernels("npu", "swiglu_mlp", ("standard",), "npu_swiglu, after a copy of gate and up into one tensor"),
        *_kernels(
            "npu", "cross_entropy_loss", ("causal",), "logits and their gradient for one chunk of tokens at a time"
        ),
        *_kernels("fused_npu", "moe_experts", ("standard",), "npu_moe_token_permute, npu_grouped_matmul, npu_swiglu"),
        *_kernels(
            "npu_fusion_attention",
            "attention",
            ("standard",),
            "dense, causal and packed",
            deterministic=False,
            features=_FEATURES,
            can_run="veomni_npu.limits:attention",
        ),
    ]


def _kernels(
    name: str,
    op_name: str,
    variants: Iterable[str],
    description: str,
    deterministic: bool = True,
    features: tuple[str, ...] = (),
    can_run: str = "",
) -> tuple[KernelSpec, ...]:
    return KernelSpec.for_variants(
        variants,
        name=name,
        op_name=op_name,
        factory=f"veomni_npu.{op_name}:{{variant}}",
        hardware=_NPU,
        description=description,
        preference=_PREFERENCE,
        deterministic=deterministic,
        features=features,
        can_run=can_run,
        expert_parallel=op_name == "moe_experts",
    )
