"""The Triton kernels of experts bound to real models together: the same step as eager, and a plan that names them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING

from kernels_anywhere import DEVICE, registry
from models import step
from tiny_models import tiny_model
from veomni_core import Hardware, OpsConfig, Site, bind, find_sites, plan_sites
from veomni_core.errors import KernelUnavailableError
from veomni_triton_moe import plugin

FIELDS = {
    "moe_implementation": "fused_triton",
    "load_balancing_loss_implementation": "triton",
}
# By model type: which of these fields have sites there.
_EXPERTS = ("moe_implementation",)
MODELS = {
    "qwen3_moe": tuple(FIELDS),
    "gpt_oss": tuple(FIELDS),
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "deepseek_v4": tuple(FIELDS),
}


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", MODELS)
def test_a_step_is_as_eager(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    model = tiny_model(model_type, torch.float32).to(DEVICE)
    model.config.output_router_logits = True
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted, wanted_gradients = step(model, ids)
    fields = {name: FIELDS[name] for name in MODELS[model_type]}
    with bind(model, {"preset": "eager", **fields}, registry=registry(plugin, anywhere=True)) as binding:
        found, gradients = step(model, ids)
    assert {decision.config_field: decision.chosen for decision in binding.plan.ops if decision.written} == {
        name: (kernel,) for name, kernel in fields.items()
    }
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for name, gradient in wanted_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_pefts_adapters_of_a_model_run_beside_the_weights(model_type):
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = LoraConfig(r=3, lora_alpha=5, target_modules=[], target_parameters=targets, init_lora_weights=False)
    model = get_peft_model(tiny_model(model_type, torch.float32).to(DEVICE), lora)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted, wanted_gradients = step(model, ids)
    fields = {"preset": "eager", "moe_implementation": "fused_triton"}
    with bind(model, fields, registry=registry(plugin, anywhere=True)) as binding:
        found, gradients = step(model, ids)
        assert binding.receipt.changed == {}  # no kernel runs on a copy of the weights with the adapters added
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert wanted_gradients.keys() == gradients.keys() and all("lora_" in name for name in gradients)
    for name, gradient in wanted_gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_without_a_gpu_they_are_refused_and_for_an_h200_they_are_planned():
    model = tiny_model("qwen3_moe", torch.float32)
    ours = registry(plugin, anywhere=False)
    config = OpsConfig.from_dict({"preset": "eager", **FIELDS}, ours)
    plan = plan_sites(find_sites(model, ours), config, hardware=Hardware.named("h200"))
    assert {decision.config_field: decision.chosen for decision in plan.ops if decision.written} == {
        name: (kernel,) for name, kernel in FIELDS.items()
    }
    with pytest.raises(KernelUnavailableError, match="fused_triton can't run here: needs device type cuda"):
        plan_sites(find_sites(model, ours), config, hardware=Hardware.named("cpu"))


@pytest.mark.parametrize(("experts", "dtype", "why"), [(8193, "bfloat16", "at most 8192 experts"), (8, "float64", "")])
def test_a_load_balancing_loss_that_it_cannot_compute_is_refused_when_planning(experts, dtype, why):
    site = Site("load_balancing_loss", "", "a rule", "standard", "proven", dtype, sizes={"experts": (experts,)})
    ours = registry(plugin, anywhere=False)
    config = {"preset": "eager", "load_balancing_loss_implementation": "triton"}
    with pytest.raises(
        KernelUnavailableError, match=why or "computes float32, bfloat16, float16, this site is float64"
    ):
        plan_sites([site], config, registry=ours, hardware="h100")
