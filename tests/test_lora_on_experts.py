"""PEFT's adapters of fused experts over bound models: what PEFT computes, without a copy of the weights."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import peft
import pytest
import torch
from torch.nn.utils import parametrize

from adapted_experts import (
    BOTH,
    EXPERTS,
    HIDDEN,
    IDS,
    INTERMEDIATE,
    KERNEL,
    MODELS,
    adapted,
    assert_equal,
    bound,
    built,
    largest_allocation,
    step,
)
from veomni_conformance.given_kernels import definitions
from veomni_core import Shadow, bind
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_torch.plugin import veomni_kernels


@pytest.mark.thorough(one_per=[])
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


@pytest.mark.thorough(one_per=[])
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


def test_a_kernel_without_the_feature_runs_on_the_sum_and_the_receipt_says_so(caplog):
    without = tuple(replace(spec, features=()) for spec in veomni_kernels() if spec.op_name == "moe_experts")
    registry = build_registry([*definitions(), PluginRecord("p", "veomni-p", "1.0", "p", kernels=without)], {})
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


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_with_pefts_own_graph_breaks(when):
    model, _ = bound("qwen3_moe", when)
    torch._dynamo.reset()
    loss, gradients = step(torch.compile(model, backend="aot_eager"))
    gradients = {name.removeprefix("_orig_mod."): each for name, each in gradients.items()}
    assert_equal((loss, gradients), step(adapted(built("qwen3_moe"))))
