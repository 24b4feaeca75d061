"""moe_implementation: eager selects the experts' eager code, whatever transformers' config says."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.integrations import moe

from models import FAMILIES_WITH_EXPERTS, assert_equal_steps, build, step
from veomni_core import bind


def _experts(model):
    return [module for module in model.modules() if hasattr(module, "gate_up_proj") and "config" in vars(module)]


@pytest.fixture
def grouped(monkeypatch):
    """Counts the calls of transformers' grouped product."""
    calls = []
    own = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def counted(self, *args, **kwargs):
        calls.append(self)
        return own(self, *args, **kwargs)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", counted)
    return calls


@pytest.mark.parametrize("family", FAMILIES_WITH_EXPERTS)
def test_eager_that_is_asked_for_runs_and_undo_gives_transformers_choice_back(family, grouped):
    model = build(family, experts_implementation="grouped_mm")
    wanted = step(build(family, experts_implementation="eager", attn_implementation="eager"))
    binding = bind(model, {"preset": "eager"})
    grouped.clear()  # what other code has registered was compared
    copied = copy.deepcopy(model)
    for bound in (model, copied):
        assert_equal_steps(step(bound), wanted)
    assert not grouped
    op = next(op for op in binding.receipt.to_dict()["ops"] if op["op"] == "moe_experts")
    assert {site["runs"] for site in op["eager"]} == {"eager"}
    assert model.config._experts_implementation == "grouped_mm"
    binding.undo()
    step(model)
    assert grouped


def test_experts_that_are_not_proven_run_what_the_model_is_set_to_and_the_receipt_says_so(grouped):
    model = build("qwen3_moe", experts_implementation="grouped_mm")
    for experts in _experts(model):
        experts.register_buffer("further", torch.zeros(2))  # nothing is proven of experts with further tensors
    binding = bind(model, {"preset": "eager", "moe_implementation": "auto"})
    step(model)
    assert grouped
    op = next(op for op in binding.receipt.to_dict()["ops"] if op["op"] == "moe_experts")
    assert {site["runs"] for site in op["eager"]} == {"grouped_mm"}


def test_eager_of_one_layer_leaves_the_others_as_the_model_is_set(grouped):
    model = build("qwen3_moe", experts_implementation="grouped_mm")
    bind(model, {"preset": "eager", "moe_implementation": {"*.layers.0.*": "eager", "default": "auto"}})
    first, *_ = _experts(model)
    step(model)
    assert first not in grouped


def test_an_implementation_that_is_set_later_runs_and_stays_and_the_receipt_says_so(grouped):
    model = build("qwen3_moe", experts_implementation="grouped_mm")
    binding = bind(model, {"preset": "eager"})
    model.set_experts_implementation("batched_mm")
    wanted = step(build("qwen3_moe", experts_implementation="batched_mm", attn_implementation="eager"))
    for bound in (model, copy.deepcopy(model)):
        assert_equal_steps(step(bound), wanted)
    assert set(binding.receipt.changed.values()) == {"its experts were set to batched_mm"}
    binding.undo()
    assert model.config._experts_implementation == "batched_mm"
