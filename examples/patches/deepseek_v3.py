"""DeepSeek-V3 with slots for its norms and its interleaved rotation, and without the classifiers.

veomni patchgen examples/patches/deepseek_v3.py -o generated
"""

import torch

from veomni_core import OpSlot
from veomni_patchgen import PatchConfig

config = PatchConfig(
    source_module="transformers.models.deepseek_v3.modeling_deepseek_v3",
    target_file="patched_modeling_deepseek_v3.py",
    description="DeepSeek-V3 whose norms are slots, as language model alone",
)
config.exclude_from_output("DeepseekV3ForSequenceClassification", "DeepseekV3ForTokenClassification")

rms_norm = OpSlot("rms_norm", "standard")


@config.modify_method("DeepseekV3RMSNorm.forward", description="the slot's kernel, where there is one")
def norm_forward(original_forward, self, hidden_states):
    if rms_norm.use_non_eager_impl:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)
    return original_forward(self, hidden_states)


@config.modify_init("DeepseekV3MoE", description="says which layer's experts these are, for reports")
def moe_init(original_init, self, config, *args, **kwargs):
    original_init(self, config, *args, **kwargs)
    self.experts_per_token = config.num_experts_per_tok


@config.example
def tiny():
    """A model of a dense layer and one with eight experts, and a step of it."""
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    sizes = {
        "model_type": "deepseek_v3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": 64,
    }
    return sizes, {"input_ids": ids, "labels": ids}
