"""Tiny checkpoints of models whose experts are stored in different ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

_SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
_MORE = {**_SHAPE, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def _mixtral(intermediate: int) -> Any:
    return MixtralForCausalLM(MixtralConfig(**{**_MORE, "intermediate_size": intermediate}, num_local_experts=3))


def _qwen3_moe(intermediate: int) -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_MORE, moe_intermediate_size=intermediate, num_experts=4))


def _deepseek_v3(intermediate: int) -> Any:
    groups = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    shape = {**_SHAPE, **_LATENT, **groups, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape, moe_intermediate_size=intermediate, intermediate_size=24))


def _qwen3_vl_moe(intermediate: int) -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**_MORE, "moe_intermediate_size": intermediate, "num_experts": 4, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))


def _gpt_oss(intermediate: int) -> Any:
    return GptOssForCausalLM(GptOssConfig(**{**_MORE, "intermediate_size": intermediate}, num_local_experts=4))


FAMILIES = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "gpt_oss": _gpt_oss,
}


def saved(family: str, folder: Path, intermediate: int = 12) -> Any:
    """A model with random weights in bfloat16, saved in ``folder`` by transformers."""
    torch.manual_seed(0)
    model = FAMILIES[family](intermediate).to(torch.bfloat16).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return model


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder: Path, **changes: Any) -> None:
    """Replace, add, or with ``None`` remove tensors of the one file in ``folder``; ``__`` in names is a dot."""
    tensors = tensors_in(folder)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
