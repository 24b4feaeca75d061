"""Sites of every variant are bound right, also where no plugin has a kernel yet: each contract's reference is one."""

from __future__ import annotations

import pytest
import torch

from counting_kernels import calls, counting_registry
from models import step
from tiny_models import tiny_model
from veomni_core import bind

REGISTRY = counting_registry("one")
VARIANTS = {
    "cohere": {("rotary_pos_emb", "pairwise")},
    "deepseek_v3": {("rotary_pos_emb", "deinterleaved"), ("moe_experts", "standard")},
    "deepseek_v4": {
        ("rms_norm", "unweighted_rounded_scale"),
        ("moe_experts", "clamped"),
        ("rotary_pos_emb", "single_tail"),
    },
    "deepseek_v32": {("dsa_indexer", "standard"), ("dsa_attention", "standard")},
    "ernie4_5": {("rotary_pos_emb", "interleaved")},
    "glm": {("rotary_pos_emb", "interleaved_partial"), ("swiglu_mlp", "standard")},
    "gpt_oss": {("rotary_pos_emb", "half_width"), ("moe_experts", "clamped"), ("rms_norm", "cast_after")},
    "kimi_linear": {("causal_conv1d", "standard"), ("kda", "standard"), ("rms_norm_gated", "sigmoid")},
    "llama4_text": {("moe_experts", "standard")},
    "longcat_flash": {("moe_experts", "standard")},
    "moshi": {("rotary_pos_emb", "full")},
    "nanochat": {("rotary_pos_emb", "sign_flipped")},
    "nemotron_h": {
        ("causal_conv1d", "standard"),
        ("mamba2_scan", "standard"),
        ("rms_norm_gated", "gate_first"),
    },
    "phi3": {("swiglu_mlp", "standard")},
    "qwen3_next": {
        ("causal_conv1d", "standard"),
        ("chunk_gated_delta_rule", "standard"),
        ("rms_norm_gated", "standard"),
        ("rotary_pos_emb", "partial"),
    },
    "recurrent_gemma": {("rotary_pos_emb", "partial")},
    "zamba": {("selective_scan", "standard"), ("swiglu_mlp", "gelu")},
}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", VARIANTS)
def test_bound_equals_eager_and_the_kernels_ran(model_type):
    model = tiny_model(model_type, torch.float32)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    wanted, wanted_gradients = step(model, ids)
    calls.clear()
    names = ("rms_norm", "rms_norm_gated", "causal_conv1d", "rotary_pos_emb", "swiglu_mlp", "cross_entropy_loss")
    names += ("chunk_gated_delta_rule", "kda", "mamba2_scan", "selective_scan", "dsa_indexer", "dsa_attention")
    fields = dict.fromkeys((*(f"{name}_implementation" for name in names), "moe_implementation"), "auto")
    with bind(model, {"preset": "eager", "attn_implementation": "auto", **fields}, registry=REGISTRY):
        found, gradients = step(model, ids)
    assert {(op, variant) for op, variant, _ in calls} >= VARIANTS[model_type]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    for name, gradient in wanted_gradients.items():
        difference = (gradients[name] - gradient).norm()
        assert difference <= 1e-3 * gradient.norm() + 1e-7, name
