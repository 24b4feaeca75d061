"""Qwen3.5-MoE: its dense sibling's patches, under other names."""

from qwen3_5 import gated_norm_forward, use_another_convolution

from veomni_patchgen import PatchConfig

config = PatchConfig("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "patched_modeling_qwen3_5_moe_gpu.py")
use_another_convolution(config)
config.override_method(
    "Qwen3_5MoeRMSNormGated.forward",
    replacement=gated_norm_forward,
    name_map={"Qwen3_5": "Qwen3_5Moe"},
    description="the dense sibling's",
)
