"""Qwen3-MoE with slots in its code: each runs the kernel that a job names, and upstream's code without one.

veomni patchgen examples/patches/qwen3_moe.py -o generated
"""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen3_moe.modeling_qwen3_moe import rotate_half

from veomni_core import OpSlot
from veomni_patchgen import PatchConfig

config = PatchConfig(
    source_module="transformers.models.qwen3_moe.modeling_qwen3_moe",
    target_file="patched_modeling_qwen3_moe.py",
    description="Qwen3-MoE whose norms, MLPs, rotation and experts are slots",
)

rms_norm = OpSlot("rms_norm", "standard")
swiglu_mlp = OpSlot("swiglu_mlp", "standard")
rotary_pos_emb = OpSlot("rotary_pos_emb", "full")
moe_experts = OpSlot("moe_experts", "standard")


@config.modify_method("Qwen3MoeRMSNorm.forward", description="the slot's kernel, where there is one")
def norm_forward(original_forward, self, hidden_states):
    if rms_norm.use_non_eager_impl:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)
    return original_forward(self, hidden_states)


@config.override_method("Qwen3MoeMLP.forward", description="gate and up as one op")
def mlp_forward(self, x):
    gate, up = self.gate_proj(x), self.up_proj(x)
    if swiglu_mlp.use_non_eager_impl:
        return self.down_proj(swiglu_mlp(gate, up))
    return self.down_proj(self.act_fn(gate) * up)


@config.replace_function("apply_rotary_pos_emb", description="the slot's kernel, where there is one")
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    if rotary_pos_emb.use_non_eager_impl:
        return rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


# ================================================================
# Patch: Qwen3MoeExperts
# 1. Without @use_experts_implementation, which would pass this forward by.
# 2. A slot for all experts at once.
# ================================================================
@config.replace_class("Qwen3MoeExperts", description="experts as one op")
class Experts(nn.Module):
    """The weights of all experts, in transformers' layout."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden, width))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        # --- Patch.2 ---
        if moe_experts.use_non_eager_impl:
            return moe_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)
        # --- Patch.2 ---
        summed = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, position = torch.where(top_k_index == expert)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            summed.index_add_(0, token, (out * top_k_weights[token, position, None]).to(summed.dtype))
        return summed


@config.example
def tiny():
    """A model of two layers with four experts, and a step of it."""
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    sizes = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "vocab_size": 64,
    }
    return sizes, {"input_ids": ids, "labels": ids, "output_router_logits": True}
