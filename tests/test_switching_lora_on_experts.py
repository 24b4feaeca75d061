"""PEFT's adapters of fused experts over bound models, put on and off: switched, merged, undone, copied, saved."""

from __future__ import annotations

import copy

import peft
import pytest
import torch

from adapted_experts import (
    BOTH,
    EXPERTS,
    HIDDEN,
    IDS,
    INTERMEDIATE,
    KERNEL,
    adapted,
    assert_equal,
    bound,
    built,
    largest_allocation,
    step,
)
from veomni_core import bind

pytestmark = pytest.mark.thorough


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
