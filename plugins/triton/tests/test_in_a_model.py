"""The Triton kernels bound to real models together: the same step as eager, and a plan that names them."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from kernels_anywhere import DEVICE, registry
from models import build, step
from tiny_models import tiny_model
from veomni_core import Hardware, OpsConfig, bind, find_sites, plan_sites
from veomni_core.errors import KernelUnavailableError
from veomni_transformers.parity import check_parity
from veomni_triton import plugin
from veomni_triton_moe import plugin as of_experts

FIELDS = {
    "rms_norm_implementation": "triton",
    "rotary_pos_emb_implementation": "triton",
}
# By model type: the variant of its rotation.
MODELS = {
    "qwen3_moe": "full",
    "gpt_oss": "half_width",
    "glm4_moe": "partial",
    "glm4_moe_lite": "deinterleaved",
    "deepseek_v3": "deinterleaved",
    "deepseek_v4": "single_tail",
    "ernie4_5": "interleaved",
}


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", MODELS)
def test_a_step_is_as_eager(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny_model(model_type, torch.float32).to(DEVICE)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted, wanted_gradients = step(model, ids)
    sites = [site for site in find_sites(model, registry(plugin, anywhere=True)) if site.op_name == "rotary_pos_emb"]
    assert {site.variant for site in sites} == {MODELS[model_type]}
    with bind(model, {"preset": "eager", **FIELDS}, registry=registry(plugin, anywhere=True)) as binding:
        found, gradients = step(model, ids)
    assert {decision.config_field: decision.chosen for decision in binding.plan.ops if decision.written} == {
        name: (kernel,) for name, kernel in FIELDS.items()
    }
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for name, gradient in wanted_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def test_without_a_gpu_they_are_refused_and_for_an_h200_they_are_planned():
    model = tiny_model("qwen3_moe", torch.float32)
    ours = registry(plugin, anywhere=False)
    config = OpsConfig.from_dict({"preset": "eager", **FIELDS}, ours)
    plan = plan_sites(find_sites(model, ours), config, hardware=Hardware.named("h200"))
    assert {decision.config_field: decision.chosen for decision in plan.ops if decision.written} == {
        name: (kernel,) for name, kernel in FIELDS.items()
    }
    with pytest.raises(KernelUnavailableError, match="triton can't run here: needs device type cuda"):
        plan_sites(find_sites(model, ours), config, hardware=Hardware.named("cpu"))


SAME = {
    "preset": "auto",
    "require": "batch_invariant",
    "linear_implementation": "triton",
    "token_logprobs_implementation": "triton_fixed_order",
}
GPT_OSS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
QWEN3_NEXT = {
    **{"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model_type, config", [("llama", {}), ("qwen3_moe", {}), ("gpt_oss", GPT_OSS), ("qwen3_next", QWEN3_NEXT)]
)
def test_every_layout_gives_the_same_bits(model_type, config):
    model = build(model_type, num_experts_per_tok=2, num_local_experts=4, output_router_logits=False, **config)
    model.to(DEVICE)
    with bind(model, SAME, registry=registry(plugin, of_experts, anywhere=True)) as binding:
        ran = {str(planned.spec) for planned in binding.plan.kernels}
        found = check_parity(model)
    assert {"attention/standard:triton", "linear/standard:triton"} <= ran
    if model_type == "qwen3_next":
        assert {"chunk_gated_delta_rule/standard:triton_fixed_order", "causal_conv1d/standard:triton"} <= ran
    assert [each for each in found if not each.same_bits] == []
