"""Qwen3-VL on an NPU: the GPU's patches, and the NPU's kernels for the norm and the rotation."""

import qwen3_vl

from veomni_patchgen import PatchConfig

config = PatchConfig(
    source_module="transformers.models.qwen3_vl.modeling_qwen3_vl",
    target_file="patched_modeling_qwen3_vl_npu.py",
    inherits=qwen3_vl.config,
)
config.add_import("torch_npu", is_from_import=False)


@config.override_method("Qwen3VLTextRMSNorm.forward", description="torch_npu's")
def norm_forward(self, hidden_states):
    return torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=self.variance_epsilon)[0]  # noqa: F821


@config.replace_function("apply_rotary_pos_emb", description="torch_npu's")
def rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)  # noqa: F821
