"""Code that somebody decorated is compared as it runs: a bound model computes what the decorated one computed."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from veomni_core import bind

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "output_router_logits": True,
}
MOE = Qwen3MoeConfig(**SIZES, mlp_only_layers=[1])
HYBRID = Qwen3NextConfig(
    **SIZES,
    layer_types=["linear_attention", "full_attention"],
    shared_expert_intermediate_size=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
GLOBALS = ("apply_rotary_pos_emb", "rotate_half", "load_balancing_loss_func", "eager_attention_forward", "repeat_kv")
CLASSES = ("RMSNorm", "MLP", "Experts", "TopKRouter", "SparseMoeBlock", "RotaryEmbedding", "Attention", "DecoderLayer")


def enlarged(function):
    """``function`` with results half as large again; ``functools.wraps`` lets it look like what it decorates."""

    @functools.wraps(function)
    def decorated(*args, **kwargs):
        found = function(*args, **kwargs)
        several = isinstance(found, tuple)
        results = tuple(
            1.5 * each if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in (found if several else (found,))
        )
        return results if several else results[0]

    return decorated


def losses(model):
    ids = torch.arange(12)[None]
    outputs = model(ids, labels=ids)
    return outputs.logits, outputs.loss, outputs.aux_loss


def model_and_results(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model, losses(model)


def assert_kept(config, holder, name, monkeypatch):
    """What ``holder`` has under ``name``, decorated, is what the bound model runs too."""
    _, plain = model_and_results(config)
    monkeypatch.setattr(holder, name, enlarged(getattr(holder, name)))
    model, wanted = model_and_results(config)
    assert any(not torch.equal(*pair) for pair in zip(wanted, plain, strict=True)), "the decorator changes nothing"
    with bind(model, {"preset": "auto"}):
        for found, each in zip(losses(model), wanted, strict=True):
            torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GLOBALS)
def test_a_decorated_function_stays_in_the_bound_model(name, monkeypatch):
    assert_kept(MOE, modeling_qwen3_moe, name, monkeypatch)


@pytest.mark.parametrize("name", CLASSES)
def test_a_decorated_forward_stays_in_the_bound_model(name, monkeypatch):
    assert_kept(MOE, getattr(modeling_qwen3_moe, f"Qwen3Moe{name}"), "forward", monkeypatch)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "causal_conv1d_fn"])
def test_a_decorated_function_of_a_hybrid_stays_in_the_bound_model(name, monkeypatch):
    assert_kept(HYBRID, modeling_qwen3_next, name, monkeypatch)
