"""Small models of every type that mixes positions by a delta rule, a scan or a short convolution, beside attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tiny_models import in_dtype, tiny_config, tiny_model

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_ssm": 128, "mamba_chunk_size": 16}
LFM2 = {**SMALL, **HEADS, "layer_types": ["conv", "full_attention"]}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32}
QWEN4 = {
    **{**SMALL, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4},
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4},
    **{"indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 16, "eos_token_id": 2},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
}
GLM5 = {
    **{**SMALL, **HEADS, "num_hidden_layers": 4, "num_key_value_heads": 4, "moe_intermediate_size": 32},
    **{"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 16, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4},
    **{"linear_head_dim": 16, "linear_num_heads": 4, "hc_mult": 2},
}


def _lfm3_vl() -> dict[str, Any]:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    marks = {"image_token_id": 96, "video_token_id": 97, "vision_start_token_id": 98, "vision_end_token_id": 99}
    return {
        "text_config": {**tiny_config("lfm3").to_dict(), "vocab_size": 100},
        "vision_config": {**vision, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"projector_hidden_size": 32, **marks},
    }


# What tiny_model can't make small by itself, or makes without such a layer. A name may add to the type what is special.
CONFIGS: dict[str, dict[str, Any]] = {
    "falcon_h1": {**SMALL, **HEADS, **MAMBA2},
    "lfm2": LFM2,
    "zamba2": {
        **{**SMALL, **HEADS, "num_hidden_layers": 3, "num_key_value_heads": 4},
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        **{"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 2, "chunk_size": 16},
    },
    "mamba2": {**SMALL, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "lfm2_moe": {
        **LFM2,
        **{"num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    },
    "lfm3_vl": _lfm3_vl(),
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "qwen4_exp_text with n-grams": {**QWEN4, "ple_layer_ids": [1], "ngram_vocab_size_base": 100, "heads_per_ngram": 2},
    # Every token takes all experts, so that rounding sends none elsewhere.
    "inkling_text": {**tiny_config("inkling_text").to_dict(), "num_experts_per_tok": 8},
    "inkling2_text of sliding layers": {
        **tiny_config("inkling2_text").to_dict(),
        "layer_types": ["hybrid_sliding"] * 4,
    },
    "glm5_next": {"text_config": GLM5, "vision_config": {**VISION, "projection_intermediate_size": 32}},
}
BY_DEFAULT = (
    *("bailing_hybrid", "bamba", "falcon_mamba", "granitemoehybrid", "inkling2_text", "jamba"),
    *("kimi_linear", "lfm3", "mamba", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "zamba"),
)
# Those with convolutions that are found.
TYPES = (*CONFIGS, *BY_DEFAULT)
LENGTHS = (5, 1, 2, 8)


def hybrid(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model in training mode, with weights so large that a layer which mixes positions shows in the logits."""
    if name not in CONFIGS:
        return tiny_model(name, dtype)
    torch.manual_seed(0)
    model_type = name.partition(" ")[0]
    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    model = auto.from_config(CONFIG_MAPPING[model_type](**CONFIGS[name]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.std() > 0:
                parameter.mul_(0.7 * parameter[0].numel() ** -0.5 / parameter.std())
    return in_dtype(model, dtype).train()


def tokens(*lengths: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, lengths, generator=generator)
