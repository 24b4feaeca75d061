"""A tiny real instance of any causal model type: its default config with every size that it states made small."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# Widths keep their proportions, since many models divide them by numbers of heads or groups.
_SMALLER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "n_inner": 96,
    "ffn_hidden_size": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "prefix_dense_intermediate_size": 96,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "sliding_window": 16,
    "embedding_size": 64,
    "output_embedding_size": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 96,
    "first_k_dense_replace": 1,
    "rotary_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "residual_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """The default config of ``model_type`` in small, with ``changes``."""
    kind = CONFIG_MAPPING[model_type]
    stated = kind().to_dict()
    return kind(**_shrunk(stated) | changes)


def _shrunk(stated: dict[str, Any]) -> dict[str, Any]:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    changes: dict[str, Any] = {n: token for n, token in tokens.items() if isinstance(stated.get(n), (int, list))}
    if "kv_lora_rank" in stated:  # keys are made from the latent, one for every head
        changes["num_key_value_heads"] = _SMALLER["num_attention_heads"]
    for name, value in stated.items():
        small = None if name in changes else _SMALLER.get(name)
        if isinstance(value, dict) and name.endswith("_config"):
            changes[name] = {**value, **_shrunk(value)}
        elif small is not None and isinstance(value, (int, float)) and not isinstance(value, bool) and value:
            changes[name] = type(value)(min(value, small))
    layers = next((changes[name] for name in ("num_hidden_layers", "num_layers", "n_layer") if name in changes), None)
    for name, value in stated.items():  # one entry per layer
        if layers is not None and isinstance(value, list) and len(value) > layers and name not in ("eos_token_id",):
            changes[name] = _spread(value, layers)
    return changes


def _spread(kinds: list[Any], layers: int) -> list[Any]:
    """``layers`` entries that hold every kind of entry there is, in their order."""
    distinct = [kind for position, kind in enumerate(kinds) if kind not in kinds[:position]]
    return [distinct[layer % len(distinct)] for layer in range(layers)] if len(distinct) <= layers else kinds[:layers]


def tiny_model(model_type: str, dtype: torch.dtype, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of ``model_type`` in training mode, with norms and biases that are not ones and zeros."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.dim() < 2 else 0.5 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return in_dtype(model, dtype).train()


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """``model`` in ``dtype``, but for what transformers keeps in float32 when it loads a checkpoint."""
    kept = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in model._keep_in_fp32_modules_strict or ()) or "$^")
    exact = {name: each.data for name, each in model.named_parameters() if kept.search(name)}
    model.to(dtype)
    for name, value in exact.items():
        model.get_parameter(name).data = value.float()
    return model
