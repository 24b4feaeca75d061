"""Qwen3 with classes and a function of liger-kernel, which are imported."""

from liger_kernel.transformers.rope import liger_rotary_pos_emb

from veomni_patchgen import PatchConfig, create_patch_from_external

config = PatchConfig(
    source_module="transformers.models.qwen3.modeling_qwen3",
    target_file="patched_modeling_qwen3_gpu.py",
    description="Qwen3 with LigerKernel GPU replacements",
)
config.patches += [
    create_patch_from_external("Qwen3RMSNorm", "liger_kernel.transformers.rms_norm", "LigerRMSNorm"),
    create_patch_from_external("Qwen3MLP", "liger_kernel.transformers.swiglu", "LigerSwiGLUMLP"),
]


@config.replace_function("apply_rotary_pos_emb", description="liger's")
def rotary(q, k, cos, sin, unsqueeze_dim=1):
    return liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
