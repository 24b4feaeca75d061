"""Models whose code declares ``OpSlot`` in class bodies or at module level, bound like any other."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from counting_kernels import calls, counting_registry
from veomni_core import OpSlot, bind, find_sites
from veomni_core.errors import SlotInUseError
from veomni_core.ops.rms_norm import standard

REGISTRY = counting_registry("one", "two", ops=("rms_norm",))
X = torch.randn(3, 8)


class Norm(nn.Module):
    """As generated modeling code writes it, slot and eager code side by side."""

    slot = OpSlot("rms_norm", "standard")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if self.slot.use_non_eager_impl:
            return self.slot(x, self.weight, 1e-6)
        return standard(x, self.weight, 1e-6)


def stack() -> nn.Module:
    return nn.Sequential(Norm(), nn.Linear(8, 8), Norm())


def ask(kernel: str, **more):
    return {"preset": "eager", "rms_norm_implementation": kernel, **more}


@pytest.fixture
def shared(monkeypatch):
    """A module with one slot for all of its models."""
    module = ModuleType("modeling_with_a_shared_slot")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = """
from torch import nn
from veomni_core import OpSlot
from veomni_core.ops.rms_norm import standard
slot = OpSlot("rms_norm", "standard")

class Model(nn.Module):
    def forward(self, x):
        return slot(x, None, 1e-6) if slot.use_non_eager_impl else standard(x, 1.0, 1e-6)
"""
    exec(source.replace("slot(x, None, 1e-6)", "slot(x, x.new_ones(8), 1e-6)"), vars(module))
    return module


def test_slots_of_a_class_body_bind_per_instance():
    one, two, eager = stack(), stack(), stack()
    assert [(site.path, site.variant) for site in find_sites(one, REGISTRY)] == [("0", "standard"), ("2", "standard")]
    bind(one, ask("one"), registry=REGISTRY)
    binding = bind(two, ask("two"), registry=REGISTRY)
    for model in (eager, one, two):
        model(X)
    assert calls == {("rms_norm", "standard", "one"): 2, ("rms_norm", "standard", "two"): 2}
    binding.undo()
    assert two[0].slot.use_eager_impl
    two(X)
    one(X)
    assert calls == {("rms_norm", "standard", "one"): 4, ("rms_norm", "standard", "two"): 2}


def test_slots_of_a_class_body_choose_per_module():
    model = stack()
    bind(model, ask({"0": "one", "default": "two"}), registry=REGISTRY)
    model(X)
    assert calls == {("rms_norm", "standard", "one"): 1, ("rms_norm", "standard", "two"): 1}


def test_a_bound_slot_compiles_and_copies():
    model = stack()
    bind(model, ask("one"), registry=REGISTRY)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X))
    twin = copy.deepcopy(model)
    calls.clear()
    twin(X)
    assert calls == {("rms_norm", "standard", "one"): 2}


def test_a_shared_slot_refuses_a_second_kernel_and_leaves_that_model_as_it_was(shared):
    first, second = shared.Model(), shared.Model()
    (site,) = find_sites(first, REGISTRY)
    assert site.detail["module"] == shared.__name__
    binding = bind(first, ask("one"), registry=REGISTRY)
    with pytest.raises(SlotInUseError, match="A module-level slot is shared by all models of its module"):
        bind(second, ask("two"), registry=REGISTRY)
    assert not vars(second).keys() & {"_veomni_binding", "_veomni_pickle_guard"}
    first(X)
    assert calls == {("rms_norm", "standard", "one"): 1}
    binding.undo()
    bind(second, ask("two"), registry=REGISTRY)
    second(X)
    assert calls[("rms_norm", "standard", "two")] == 1


def test_a_shared_slot_serves_two_models_that_agree(shared):
    first, second = shared.Model(), shared.Model()
    one, other = (bind(model, ask("one"), registry=REGISTRY) for model in (first, second))
    one.undo()
    assert shared.slot.is_bound, "the other model still needs it"
    other.undo()
    assert not shared.slot.is_bound
