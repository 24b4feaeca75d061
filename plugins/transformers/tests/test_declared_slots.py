"""Models whose code declares ``OpSlot`` in class bodies or at module level, bound like any other."""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from counting_kernels import calls, counting_registry
from models import build
from veomni_core import OpSlot, bind, find_sites
from veomni_core.errors import BindingError, ConformanceError
from veomni_ops.rms_norm import standard

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
from veomni_ops.rms_norm import standard
slot = OpSlot("rms_norm", "standard")

class Model(nn.Module):
    def forward(self, x):
        return slot(x, x.new_ones(8), 1e-6) if slot.use_non_eager_impl else standard(x, 1.0, 1e-6)

def normalise(x):
    return slot(x, x.new_ones(8), 1e-6) if slot.use_non_eager_impl else standard(x, 1.0, 1e-6)

class ByFunction(nn.Module):
    def forward(self, x):
        return normalise(x)

class ByMethod(nn.Module):
    def forward(self, x):
        return self.normalised(x)

    def normalised(self, x):
        return normalise(x)
"""
    exec(source, vars(module))
    return module


def test_slots_of_a_class_body_bind_per_instance():
    one, two, eager = stack(), stack(), stack()
    slots = [(site.path, site.variant) for site in find_sites(one, REGISTRY) if site.op_name == "rms_norm"]
    assert slots == [("0", "standard"), ("2", "standard")]
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


def test_a_slot_at_module_level_binds_per_model_whichever_comes_first(shared):
    eager, one, two = (shared.Model() for _ in range(3))
    bindings = [bind(model, ask(kernel), registry=REGISTRY) for model, kernel in ((one, "one"), (two, "two"))]
    bind(eager, ask("eager"), registry=REGISTRY)
    for model in (shared.Model(), eager, one, two):
        model(X)
    assert calls == {("rms_norm", "standard", "one"): 1, ("rms_norm", "standard", "two"): 1}
    assert not shared.slot.is_bound, "the module's own slot serves models that nobody bound"
    for binding in bindings:
        binding.undo()
    for model in (one, two):
        model(X)
    assert sum(calls.values()) == 2


def test_a_slot_that_a_called_function_names_binds_per_model(shared):
    one, eager = shared.ByFunction(), shared.ByFunction()
    bind(one, ask("one"), registry=REGISTRY)
    compiled = torch.compile(one, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), eager(X))
    calls.clear()
    one(X)
    eager(X)
    assert calls == {("rms_norm", "standard", "one"): 1}


def test_a_slot_that_no_forward_names_is_left_eager_and_says_what_to_do(shared):
    (site,) = find_sites(shared.ByMethod(), REGISTRY)
    assert site.variant is None and "declare it in a class body" in site.evidence
    model = shared.ByMethod()
    binding = bind(model, ask(["one", "eager"]), registry=REGISTRY)
    model(X)
    assert not calls and "declare it in a class body" in binding.receipt.table()


def test_a_declared_site_says_so_in_plan_and_receipt(shared):
    for model in (shared.Model(), stack()):
        binding = bind(model, ask("one"), registry=REGISTRY)
        assert "declared, not proven" in binding.plan.table() and "declared, not proven)" in binding.receipt.table()
        (op,) = [op for op in binding.receipt.to_dict()["ops"] if op["op"] == "rms_norm"]
        assert op["declared"] == op["bound"] > 0
        assert '"declared": true' in binding.plan.to_json()


def test_undo_takes_the_kernels_out_of_copies_too():
    model = stack()
    binding = bind(model, ask("one"), registry=REGISTRY)
    part = copy.deepcopy(model[0])
    part(X)
    assert sum(calls.values()) == 1
    binding.undo()
    part(X)
    assert sum(calls.values()) == 1


class MisusedSlot(Norm):
    """Its own code has another eps than it gives to the kernel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        if self.slot.use_non_eager_impl:
            return self.slot(x, self.weight, self.eps)
        return standard(x, self.weight, 1e-6)


@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_verify_compares_what_a_slot_declares_with_the_eager_code_beside_it(eps):
    model = build("llama")
    model.model.norm = MisusedSlot(32, eps)
    before = model.model.norm.weight._version, torch.get_rng_state()
    if eps == 1.0:
        with pytest.raises(ConformanceError, match="one at model.norm, found by the rule 'op slots', is not what"):
            bind(model, ask("one"), registry=REGISTRY, verify=True)
    else:
        receipt = bind(model, ask("one"), registry=REGISTRY, verify=True).receipt.to_dict()
        assert receipt["verified_sites"] == ["rms_norm/standard:one at 5 sites"] and not receipt["not_verified"]
    assert model.model.norm.weight._version == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_verify_lists_what_it_could_not_run():
    receipt = bind(stack(), ask("one"), registry=REGISTRY, verify=True).receipt
    assert receipt.verified == ("rms_norm/standard:one on cpu in float32",)
    assert [path.split(": ")[0] for path in receipt.to_dict()["not_verified"]] == [
        "rms_norm/standard:one at 0",
        "rms_norm/standard:one at 2",
    ]
    assert "Not verified: rms_norm/standard:one at 0: the model has no dummy_inputs" in receipt.table()
    with torch.device("meta"):
        model = build("llama")
    (left_out,) = bind(model, ask("one"), registry=REGISTRY, verify=True).receipt.to_dict()["not_verified"]
    assert left_out.startswith("rms_norm/standard:one: the model has weights on the meta device")


class Rotation(nn.Module):
    """As VeOmni's generated code declares it."""

    slot = OpSlot("apply_rotary_pos_emb", "full")

    def forward(self, q, k, cos, sin):
        return self.slot(q, k, cos, sin) if self.slot.has_kernel else (q, k)


def test_slots_under_veomnis_names_are_bound():
    model = nn.Sequential(Rotation())
    registry = counting_registry("one", ops=("rotary_pos_emb",))
    assert not model[0].slot.has_kernel
    bind(model, {"preset": "eager", "rotary_pos_emb_implementation": "one"}, registry=registry)
    calls.clear()
    model[0](torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    assert model[0].slot.has_kernel and calls[("rotary_pos_emb", "full", "one")] == 1


def test_a_kernels_name_is_answered_with_the_line_that_binds_it():
    with pytest.raises(
        BindingError, match=r"A model binds it by its name: .*bind\(model, {'rms_norm_impl.*: 'liger_kernel'}"
    ):
        OpSlot("rms_norm").bind("liger")
