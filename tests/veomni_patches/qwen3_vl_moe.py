"""Qwen3-VL-MoE: the dense sibling's patches under other names, experts as a slot, and the plan for several ranks."""

import torch
from qwen3_vl import dummy_forward, model_forward
from torch import nn
from transformers.activations import ACT2FN

from veomni_core import OpSlot
from veomni_patchgen import PatchConfig

config = PatchConfig(
    source_module="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
    target_file="patched_modeling_qwen3_vl_moe_gpu.py",
)
names = {"Qwen3VL": "Qwen3VLMoe"}
config.override_method("Qwen3VLMoeVisionModel.dummy_forward", replacement=dummy_forward, name_map=names, new=True)
config.modify_method("Qwen3VLMoeModel.forward", replacement=model_forward, name_map=names)

moe_experts = OpSlot("moe_experts", "standard")


@config.replace_class("Qwen3VLMoeTextExperts", description="without @use_experts_implementation, as a slot")
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
        if moe_experts.use_non_eager_impl:
            return moe_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)
        summed = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, position = torch.where(top_k_index == expert)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            summed.index_add_(0, token, (out * top_k_weights[token, position, None]).to(summed.dtype))
        return summed


@config.modify_init("Qwen3VLMoeModel", description="the choice of experts, in the text's config too")
def model_init(original_init, self, config):
    config.text_config._moe_implementation = getattr(config, "_moe_implementation", "eager")
    original_init(self, config)


@config.override_method("Qwen3VLMoeForConditionalGeneration.get_parallel_plan", new=True)
def get_parallel_plan(self):
    return {"ep": {"model.language_model.layers.*.mlp.experts.gate_up_proj": 0}}


@config.example
def tiny():
    """A model with a vision tower and four experts, and a step of text alone."""
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    text |= {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    sizes = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": vision, "image_token_id": 60}
    return sizes, {"input_ids": ids, "labels": ids}
