"""Kernels without a backward: planned and bound for evaluation, and refused where gradients are recorded."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from models import build
from planned_norms import registry as registry_of
from veomni_core import KernelSpec, OpsConfig, Plan, apply_plan, bind, make_plan
from veomni_core.errors import BindingError, ConformanceError, KernelUnavailableError
from veomni_ops import rms_norm

REFERENCE = rms_norm.CONTRACTS["standard"].reference


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    module = ModuleType("acme_inference")
    module.norm = lambda x, weight, eps: REFERENCE(x.detach(), weight.detach(), eps)  # type: ignore[attr-defined]
    module.wrong = lambda x, weight, eps: 2 * x.detach()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_inference", module)


def config(value="acme", factory="acme_inference:norm"):
    spec = KernelSpec("acme", "rms_norm", "standard", factory, backward=False, preference=90)
    registry = registry_of(spec)
    return OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": value}, registry, environ={})


def logits(model):
    return model(torch.arange(12).view(1, 12)).logits


def test_it_runs_in_a_model_that_is_evaluated():
    own, model = build("llama"), build("llama")
    model.load_state_dict(own.state_dict())
    binding = bind(model, config(), training=False, device="cpu")
    assert {decision.kernel for op in binding.plan.ops for decision in op.sites if decision.bound} == {"acme"}
    with torch.no_grad():
        torch.testing.assert_close(logits(model), logits(own))
    with torch.inference_mode():
        torch.testing.assert_close(logits(model), logits(own))
    assert "for evaluation" in str(binding.receipt)


def test_it_raises_where_gradients_are_recorded():
    model = build("llama")
    bind(model, config(), training=False, device="cpu")
    with pytest.raises(BindingError, match="rms_norm/standard:acme has no backward and was bound for evaluation"):
        logits(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    logits(model)


def test_training_does_not_choose_it():
    with pytest.raises(KernelUnavailableError, match="has no backward, and training needs one"):
        make_plan(build("llama"), config())
    plan = make_plan(build("llama"), config("auto"))
    assert not any(decision.bound for op in plan.ops for decision in op.sites)
    plan = make_plan(build("llama"), config("auto"), training=False)
    assert any(decision.bound for op in plan.ops for decision in op.sites)


def test_the_use_is_part_of_the_plan():
    model = build("llama")
    training, evaluation = (make_plan(model, config("eager"), training=use) for use in (True, False))
    assert training.sha256 != evaluation.sha256
    assert training.diff(evaluation) == ("for training -> for evaluation",)
    again = Plan.from_json(evaluation.to_json())
    assert again == evaluation
    apply_plan(model, again, config().registry)


def test_verify_compares_its_values():
    binding = bind(build("llama"), config(), training=False, device="cpu", verify=True)
    assert binding.verification.sites == ("rms_norm/standard:acme at 5 sites",)
    with pytest.raises(ConformanceError, match="rms_norm/standard:acme"):
        bind(build("llama"), config(factory="acme_inference:wrong"), training=False, device="cpu", verify=True)
