"""The Triton kernels of hybrid models bound together in real models, in the ways in which people train them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from kernels_anywhere import DEVICE, registry
from models import step
from tiny_models import tiny_model
from veomni_core import bind, find_sites
from veomni_triton import plugin

CONVOLUTION, NORM = "causal_conv1d_implementation", "rms_norm_gated_implementation"
SCAN, DELTA_RULE = "mamba2_scan_implementation", "chunk_gated_delta_rule_implementation"
# By model type: the fields that have sites there, and the variant of the gated norm.
MODELS = {
    "qwen3_next": ((CONVOLUTION, DELTA_RULE, NORM), "standard"),
    "kimi_linear": ((CONVOLUTION, NORM), "sigmoid"),
    "nemotron_h": ((CONVOLUTION, SCAN, NORM), "gate_first"),
}
LENGTHS = (5, 1, 2, 8)
# Triton's interpreter takes its time for each head and column.
FEW_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} | dict.fromkeys(
    ("linear_key_head_dim", "linear_value_head_dim"), 16
)


def tokens(*shape):
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def model_of(model_type, dtype=torch.float32, **changes):
    return tiny_model(model_type, dtype, **(FEW_HEADS if model_type == "qwen3_next" else {}), **changes).to(DEVICE)


def bound(model, model_type="qwen3_next"):
    fields = dict.fromkeys(MODELS[model_type][0], "triton")
    binding = bind(model, {"preset": "eager", **fields}, registry=registry(plugin, anywhere=True))
    assert {op.config_field: op.chosen for op in binding.plan.ops if op.written} == dict.fromkeys(fields, ("triton",))
    return binding


def off(found, exact):
    """How far the loss and all gradients together are from the exact ones, as shares of them."""
    assert found[1].keys() == exact[1].keys()
    pairs = [(found[1][name].double(), gradient.double()) for name, gradient in exact[1].items()]
    distance = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
    return float((found[0] - exact[0]).abs() / exact[0].abs()), float(distance) ** 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", MODELS)
def test_a_step_is_as_eager(model_type):
    model, ids = model_of(model_type), tokens(2, 12)
    wanted = step(model, ids)
    variants = {
        site.variant for site in find_sites(model, registry(plugin, anywhere=True)) if site.op_name == "rms_norm_gated"
    }
    assert variants == {MODELS[model_type][1]}
    binding = bound(model, model_type)
    loss, gradients = off(step(model, ids), wanted)
    assert loss < 1e-5 and gradients < 1e-4
    binding.undo()
    again = step(model, ids)
    assert torch.equal(again[0], wanted[0])


@pytest.mark.thorough
def test_evaluation_and_checkpointing_between_steps():
    model, ids = model_of("qwen3_next"), tokens(2, 12)
    wanted, logits = step(model, ids), model.eval()(input_ids=ids, use_cache=False).logits
    bound(model)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, logits, rtol=1e-4, atol=1e-5)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    loss, gradients = off(step(model, ids), wanted)
    assert loss < 1e-5 and gradients < 1e-4


@pytest.mark.thorough
def test_under_autocast_it_is_as_accurate_as_eager():
    """Every token takes all experts: one that rounding sends elsewhere makes an error as large as the gradients."""
    model, ids = model_of("qwen3_next", num_experts=8, num_experts_per_tok=8), tokens(8, 12)
    exact = step(model, ids)
    with torch.autocast(DEVICE, torch.bfloat16):
        wanted = off(step(model, ids), exact)
        bound(model)
        found = off(step(model, ids), exact)
    assert found[1] < 1.25 * wanted[1] + 1e-3


def test_adapters_and_frozen_weights():
    model, ids = model_of("qwen3_next"), tokens(2, 12)
    adapters = LoraConfig(r=2, target_modules=["in_proj_qkvz", "out_proj"], init_lora_weights=False)
    model = inject_adapter_in_model(adapters, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    wanted = step(model, ids)
    bound(model)
    loss, gradients = off(step(model, ids), wanted)
    assert loss < 1e-5 and gradients < 1e-4


def test_packed_sequences_stay_apart():
    model, ids = model_of("qwen3_next").eval(), tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(DEVICE)
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    bound(model)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
