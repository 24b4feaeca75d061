"""Which of torch's operators a process replaces is part of its plan, of certificates, and of what ranks compare."""

from __future__ import annotations

import pytest

from models import build
from planned_norms import REGISTRY
from veomni_conformance.ranks.conditions import differences, rank_conditions
from veomni_conformance.this_machine import ThisMachine
from veomni_core import Hardware, Plan, make_plan
from veomni_ops.torch_overrides import PYTHON_NATIVE, changed_overrides

native = pytest.importorskip("torch.backends.python_native", reason="torch 2.13 has it")
EAGER = {"preset": "eager"}


def recorded():
    spec = REGISTRY.resolve("rms_norm", "standard", "torch")
    checked = ThisMachine(Hardware.cpu()).checked(spec, REGISTRY.plugin_of(spec), "float32")
    return make_plan(build("llama"), EAGER, hardware=None), checked, rank_conditions()


@pytest.fixture(scope="module")
def former():
    return recorded()


def test_operators_that_are_given_back_are_recorded(former):
    with native.operations_disabled("topk"):
        plan, checked, conditions = recorded()
    assert plan.overrides == "without topk"
    assert plan.sha256 != former[0].sha256 and plan.diff(former[0]) == ("torch's operators: without topk -> its own",)
    assert Plan.from_json(plan.to_json()) == plan and "torch's operators in this process: without topk" in plan.table()
    assert [*checked.differences(former[1])] == [f"{PYTHON_NATIVE} without topk (here none)"]
    (said,) = differences({0: former[2], 1: conditions})
    assert said.startswith(f"rank 1: {PYTHON_NATIVE}: ") and said.endswith("without topk")
    assert recorded() == former


def test_an_operator_of_ones_own_is_recorded(former):
    from torch._native import registry

    registry.register_op_override("acme", "aten", "rsqrt", "CPU", lambda x: False, own_rsqrt)
    try:
        registry._register_overrides_from_graph("rsqrt", "CPU", registry._graphs["rsqrt", "CPU"])
        plan, checked, conditions = recorded()
    finally:
        registry._destroy_aten_override("rsqrt", "CPU")
        del registry._graphs["rsqrt", "CPU"]
    assert plan.overrides == f"rsqrt on CPU by {__name__}.own_rsqrt"
    assert plan.sha256 != former[0].sha256 and checked != former[1]
    assert conditions[PYTHON_NATIVE] != former[2].get(PYTHON_NATIVE)
    assert not changed_overrides()


def own_rsqrt(x):
    return x


def test_a_plan_for_named_hardware_does_not_depend_on_this_process():
    with native.operations_disabled("topk"):
        assert not make_plan(build("llama"), EAGER, hardware="h200").overrides
