"""Tiny models with the gated delta rule, and its sites."""

from __future__ import annotations

from models import build
from veomni_core import find_sites

OP = "chunk_gated_delta_rule"
ALONE = {"preset": "eager", f"{OP}_implementation": "chunked_delta"}
LINEAR = {
    "num_hidden_layers": 4,  # the fourth has full attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = {
    "qwen3_next": {**LINEAR, **EXPERTS},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS},
    "olmo_hybrid": LINEAR,
}


def family(name, **options):
    return build(name, **{**FAMILIES[name], **options})


def delta_sites(model):
    return [site for site in find_sites(model) if site.op_name == OP]
