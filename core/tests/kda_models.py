"""Tiny models with Kimi delta attention, and the code that transformers has for it."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tiny_models import tiny_model
from veomni_core import find_sites

OP = "kda"
FIELD = f"{OP}_implementation"
ALONE = {"preset": "eager", FIELD: "chunked_kda"}
ROUTED = ("kimi_linear", "bailing_hybrid", "glm5_next")
FAMILIES = tuple(name for name in ROUTED if name in CONFIG_MAPPING)
needs_kda = pytest.mark.skipif(not FAMILIES, reason="this transformers has no model with Kimi delta attention")
GLM = {
    "text_config": {
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32},
        **{"q_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 16, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4},
        **{"linear_head_dim": 16, "linear_num_heads": 4, "pad_token_id": 0, "hc_mult": 2},
    },
    "vision_config": {
        **{"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32},
        "projection_intermediate_size": 32,
    },
}


def family(name, dtype=torch.float32):
    if name != "glm5_next":
        return tiny_model(name, dtype)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**GLM), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.dim() < 2 else 0.5 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return model.to(dtype).train()


def modeling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def own(name="kimi_linear"):
    """transformers' function in plain PyTorch."""
    return inspect.unwrap(modeling(name).chunk_kimi_delta_attention)


def kda_sites(model):
    return [site for site in find_sites(model) if site.op_name == OP]
