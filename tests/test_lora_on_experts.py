"""PEFT's adapters of fused experts over bound models: what PEFT computes, without a copy of the weights."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace

import peft
import pytest
import torch
from torch.nn.utils import parametrize
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from veomni_core import Shadow, bind
from veomni_core.discovery.conflicts import CORE
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_torch.plugin import veomni_kernels

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE["vocab_size"] = 96
EXPERTS, INTERMEDIATE, HIDDEN = 8, 48, 64
MODELS = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=INTERMEDIATE)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SHAPE, num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE, num_experts_per_tok=2)
    ),
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.arange(40).view(2, 20) * 7 % 96
KERNEL = {"preset": "eager", "moe_implementation": "grouped_mm"}


def adapted(model, seed=1, name="default", **settings):
    """``model`` under a new adapter; its routers and embeddings are trained, so that gradients pass through experts."""
    settings = {"r": 3, "lora_alpha": 5, "target_parameters": BOTH, "target_modules": []} | settings
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, config, adapter_name=name)
    for path, parameter in model.named_parameters():
        if path.endswith(("embed_tokens.weight", "mlp.gate.weight", "mlp.router.weight")):
            parameter.requires_grad_()
    return model


def built(family):
    torch.manual_seed(0)
    return MODELS[family]().train()


def bound(family, when="before", **settings):
    """A bound model under an adapter, put on ``before`` or ``after`` bind; and its binding."""
    model = built(family)
    if when == "before":
        model = adapted(model, **settings)
    binding = bind(model, KERNEL, device="cpu")
    return (model if when == "before" else adapted(model, **settings)), binding


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_equal(found, wanted, tolerance=2e-5):
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=tolerance, atol=tolerance * gradient.abs().max())


def largest_allocation(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", MODELS)
def test_equals_pefts_own_computation(family, when, targets):
    model, binding = bound(family, when, target_parameters=targets)
    wanted = step(adapted(built(family), target_parameters=targets))
    assert any("lora_A" in name for name in wanted[1])
    for _ in range(2):
        assert_equal(step(model), wanted)
    assert binding.receipt.changed == {}
    assert all(each.grad is None for name, each in model.named_parameters() if "experts" in name and "lora" not in name)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", MODELS)
def test_nothing_as_large_as_the_weights_is_allocated(family, when):
    model, _ = bound(family, when)
    step(model)  # where PEFT wrapped a bound model, its wrappers learn in the first step that torch need not check
    smaller = EXPERTS * HIDDEN * INTERMEDIATE * 4  # bytes of down_proj; gate_up_proj has twice as many
    assert largest_allocation(lambda: step(model)) < smaller
    unbound = adapted(built(family))
    assert largest_allocation(lambda: step(unbound)) >= 2 * smaller


def test_before_bind_the_first_step_allocates_no_copy_either():
    model, _ = bound("qwen3_moe")
    assert largest_allocation(lambda: step(model)) < EXPERTS * HIDDEN * INTERMEDIATE * 4


def test_frozen_experts_get_no_gradient_work_where_only_linears_are_adapted():
    model, _ = bound("qwen3_moe", target_modules=["q_proj"], target_parameters=None)
    assert largest_allocation(lambda: step(model)) < EXPERTS * HIDDEN * INTERMEDIATE * 4


def _two_adapters(model):
    second = peft.LoraConfig(
        r=5, lora_alpha=3, target_parameters=BOTH, target_modules=[], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(2)
    model.add_adapter("second", second)
    return model


@pytest.mark.parametrize("when", ["before", "after"])
def test_several_adapters_and_switching(when):
    model, binding = bound("qwen3_moe", when)
    pair = [_two_adapters(each) for each in (model, adapted(built("qwen3_moe")))]
    results = []
    for active in ("default", "second", ["default", "second"], "default"):
        for each in pair:
            each.base_model.set_adapter(active)
        found, wanted = (step(each) for each in pair)
        assert_equal(found, wanted)
        results.append(float(wanted[0]))
    assert len(set(results)) == 3
    assert binding.receipt.changed == {}
    for each in pair:
        each.base_model.set_adapter(["default", "second"])
    assert largest_allocation(lambda: step(pair[0])) < EXPERTS * HIDDEN * INTERMEDIATE * 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_disabling_merging_and_unmerging(when):
    model, _ = bound("gpt_oss", when)
    other = adapted(built("gpt_oss"))
    wanted = step(other)
    with model.disable_adapter(), other.disable_adapter(), torch.no_grad():
        without = other(input_ids=IDS, labels=IDS).loss
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, without)
    assert float(without) != float(wanted[0])
    model.merge_adapter()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, wanted[0], rtol=1e-5, atol=1e-5)
    model.unmerge_adapter()
    assert_equal(step(model), wanted)
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=IDS, labels=IDS).loss, wanted[0], rtol=1e-5, atol=1e-5)


def test_rank_stabilised_scaling():
    model, _ = bound("qwen3_moe", use_rslora=True, r=4, lora_alpha=3)
    scalings = {each.scaling["default"] for each in model.modules() if isinstance(each, peft.tuners.lora.ParamWrapper)}
    assert scalings == {3 / math.sqrt(4)}
    assert_equal(step(model), step(adapted(built("qwen3_moe"), use_rslora=True, r=4, lora_alpha=3)))


@pytest.mark.parametrize("settings, words", [({"use_dora": True}, "use_dora"), ({"lora_dropout": 0.1}, "lora_dropout")])
def test_peft_refuses_what_it_cannot_adapt_parameters_with(settings, words):
    model = built("qwen3_moe")
    bind(model, KERNEL, device="cpu")
    with pytest.raises(ValueError, match=words):
        adapted(model, **settings)


@pytest.mark.parametrize("when", ["before", "after"])
def test_undo_and_copies(when):
    model, binding = bound("qwen3_moe", when)
    wanted = step(adapted(built("qwen3_moe")))
    step(model)
    duplicate = copy.deepcopy(model)
    assert largest_allocation(lambda: step(duplicate)) < EXPERTS * HIDDEN * INTERMEDIATE * 4
    binding.undo()
    assert type(next(iter(_wrappers(model)))) is peft.tuners.lora.ParamWrapper
    assert_equal(step(model), wanted, tolerance=1e-6)
    assert_equal(step(duplicate), wanted)


def _wrappers(model):
    return [each for each in model.modules() if isinstance(each, peft.tuners.lora.ParamWrapper)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_adapter_is_saved_and_loaded(tmp_path, when):
    model, _ = bound("qwen3_moe", when)
    wanted = step(model)
    model.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(built("qwen3_moe"), tmp_path)
    again = built("qwen3_moe")
    bind(again, KERNEL, device="cpu")
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    with torch.no_grad():
        for each in (plain, again):
            loss = each(input_ids=IDS, labels=IDS).loss
            torch.testing.assert_close(loss, wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_own_code_beside_adapted_experts_agrees(when):
    model, _ = bound("qwen3_moe", when)
    wanted = step(adapted(built("qwen3_moe")))
    with Shadow(model) as shadow:
        for _ in range(2):
            assert_equal(step(model), wanted)
    assert shadow.describe() == "moe_experts/standard:grouped_mm at 2 sites"
    assert shadow.breaches == {}


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_forwards_before_a_backward(when):
    model, _ = bound("qwen3_moe", when)
    results = []
    for each in (model, adapted(built("qwen3_moe"))):
        loss = sum(each(input_ids=ids, labels=ids).loss for ids in (IDS, IDS.flip(1), IDS + 1))
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in each.named_parameters() if p.grad is not None}))
    assert_equal(*results)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    model, _ = bound("qwen3_moe")
    other = adapted(built("qwen3_moe"))
    for each in (model, other):
        each.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal(step(model), step(other))
    assert largest_allocation(lambda: step(model)) < EXPERTS * HIDDEN * INTERMEDIATE * 4


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_with_adapters_in_float32(weights):
    """PEFT casts the factors to the weights' dtype; under autocast both are cast for the products."""

    def in_16_bits(model):
        with torch.autocast("cpu", torch.bfloat16):
            return step(model)

    model = adapted(built("qwen3_moe").to(weights))
    bind(model, KERNEL, device="cpu", autocast="bfloat16")
    other = adapted(built("qwen3_moe").to(weights))
    exact = step(adapted(built("qwen3_moe")))
    factors = [each for name, each in model.named_parameters() if "lora_" in name]
    assert {each.dtype for each in factors} == {torch.float32}
    found, wanted = in_16_bits(model), in_16_bits(other)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-2, atol=2e-2)
    for name, gradient in exact[1].items():
        if "lora_" in name:
            assert found[1][name].dtype == torch.float32
            mine, theirs = ((each[1][name].float() - gradient).norm() / gradient.norm() for each in (found, wanted))
            assert mine < max(1.5 * theirs, 0.03), name


def test_several_adapters_in_the_first_forward_of_a_bound_model():
    """PEFT adds up their products in that forward, before its wrappers are changed."""
    model, binding = bound("qwen3_moe", "after")
    other = adapted(built("qwen3_moe"))
    for each in (model, other):
        _two_adapters(each).base_model.set_adapter(["default", "second"])
    wanted = step(other)
    for _ in range(2):
        assert_equal(step(model), wanted)
    assert binding.receipt.changed == {}
    assert largest_allocation(lambda: step(model)) < EXPERTS * HIDDEN * INTERMEDIATE * 4


def test_a_kernel_without_the_feature_runs_on_the_sum_and_the_receipt_says_so(caplog):
    without = tuple(replace(spec, features=()) for spec in veomni_kernels() if spec.op_name == "moe_experts")
    registry = build_registry([CORE, PluginRecord("p", "veomni-p", "1.0", "p", kernels=without)], {})
    model = built("qwen3_moe")
    binding = bind(model, KERNEL, device="cpu", registry=registry)
    model = adapted(model)
    with caplog.at_level(logging.WARNING):
        found = step(model)
        step(model)
    assert_equal(found, step(adapted(built("qwen3_moe"))))
    what = (
        "grouped_mm runs on a copy of the weights with the adapters added: moe_experts/standard:grouped_mm has no "
        "feature 'lora'"
    )
    assert set(binding.receipt.changed.values()) == {what}
    assert sorted(binding.receipt.changed) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert f"Changed since: model.layers.0.mlp.experts: {what}" in str(binding.receipt)
    assert [record.getMessage() for record in caplog.records].count(f"model.layers.0.mlp.experts: {what}") == 1
    assert sum(what in record.getMessage() for record in caplog.records) == 1  # not once per layer


def test_another_parametrization_is_summed_and_said():
    model = built("qwen3_moe")
    binding = bind(model, KERNEL, device="cpu")

    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    experts = model.model.layers[0].mlp.experts
    parametrize.register_parametrization(experts, "down_proj", Doubled())
    loss, _ = step(model)
    other = built("qwen3_moe")
    with torch.no_grad():
        other.model.layers[0].mlp.experts.down_proj *= 2
    torch.testing.assert_close(loss, step(other)[0])
    (said,) = binding.receipt.changed.values()
    assert said.endswith("down_proj: the parametrization Doubled keeps no low-rank factors")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_with_pefts_own_graph_breaks(when):
    model, _ = bound("qwen3_moe", when)
    torch._dynamo.reset()
    loss, gradients = step(torch.compile(model, backend="aot_eager"))
    gradients = {name.removeprefix("_orig_mod."): each for name, each in gradients.items()}
    assert_equal((loss, gradients), step(adapted(built("qwen3_moe"))))
