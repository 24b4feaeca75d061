"""OpSlot: per instance in a class body, guarded at module level."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from veomni_core import OpSlot
from veomni_core.errors import BindingError, BoundModelPickleError, SlotInUseError


class Norm(nn.Module):
    norm = OpSlot("rms_norm", "standard")

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if self.norm.use_non_eager_impl:
            return self.norm(x, self.weight, 1e-6)
        return x * self.weight


class SubNorm(Norm):
    pass


def plus_one(x, weight, eps):
    return x + 1


def plus_two(x, weight, eps):
    return x + 2


X = torch.ones(2, 4)


def test_a_class_body_slot_serves_each_instance_on_its_own():
    eager, one, two = Norm(), Norm(), SubNorm()
    one.norm.bind(plus_one)
    two.norm.bind(plus_two)
    assert [float(m(X)[0, 0]) for m in (eager, one, two)] == [1, 2, 3]
    assert one.norm.is_bound and one.norm.bound_kernel() is plus_one and not one.norm.use_eager_impl
    assert not eager.norm.is_bound and eager.norm.use_eager_impl and eager.norm.bound_kernel() is None
    one.norm.unbind()
    assert float(one(X)[0, 0]) == 1


def test_the_declaration_itself_cannot_be_bound():
    with pytest.raises(
        BindingError, match=r"one slot per instance: bind the instance's \(module.norm\), not Norm.norm"
    ):
        Norm.norm.bind(plus_one)


def test_a_copy_of_a_module_has_a_slot_of_its_own():
    one = Norm()
    one.norm.bind(plus_one)
    twin = copy.deepcopy(one)
    assert float(twin(X)[0, 0]) == 2
    twin.norm.unbind()
    assert float(one(X)[0, 0]) == 2


def test_an_empty_slot_is_pickled_and_a_bound_one_says_why_not():
    restored = pickle.loads(pickle.dumps(OpSlot("rms_norm", "standard")))
    assert (restored.op_name, restored.variant, restored.is_bound) == ("rms_norm", "standard", False)
    slot = OpSlot("rms_norm", "standard")
    slot.bind(plus_one)
    with pytest.raises(BoundModelPickleError, match="can't be pickled with its kernel"):
        pickle.dumps(slot)


def test_state_dict_and_compile_are_undisturbed():
    one, eager = Norm(), Norm()
    one.norm.bind(plus_one)
    assert list(one.state_dict()) == ["weight"]
    for module, value in ((one, 2), (eager, 1)):
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert float(compiled(X)[0, 0]) == value


def test_a_module_level_slot_refuses_a_second_kernel_while_a_model_holds_the_first():
    slot, first, second = OpSlot("rms_norm", "standard"), Norm(), Norm()
    slot.bind(plus_one, holder=first)
    slot.bind(plus_one, holder=second)
    message = r"holds \S*test_slot\.plus_one for a live Norm and a live Norm; binding \S*test_slot\.plus_two would"
    with pytest.raises(SlotInUseError, match=message):
        slot.bind(plus_two, holder=second)
    slot.unbind(first)
    assert slot.bound_kernel() is plus_one
    slot.unbind(second)
    assert not slot.is_bound


def kernel_of(module):
    def rms_norm(x, weight, eps):
        return x

    rms_norm.__module__, rms_norm.__qualname__ = module, "rms_norm"
    return rms_norm


def test_kernels_of_one_name_are_told_apart_by_their_modules_and_else_by_their_addresses():
    slot, model = OpSlot("rms_norm", "standard"), Norm()
    slot.bind(kernel_of("veomni_liger.rms_norm"), holder=model)
    with pytest.raises(SlotInUseError, match=r"holds veomni_liger.rms_norm.rms_norm for a live Norm; binding veomni_q"):
        slot.bind(kernel_of("veomni_quack.rms_norm"), holder=Norm())
    other = kernel_of("veomni_liger.rms_norm")
    with pytest.raises(
        SlotInUseError, match=rf"holds \S+ at 0x\w+ for a live Norm; binding \S+ at {id(other):#x} would"
    ):
        slot.bind(other, holder=Norm())


def test_a_slot_bound_for_no_model_in_particular_says_so():
    slot = OpSlot("rms_norm", "standard")
    slot.bind(plus_one)
    with pytest.raises(SlotInUseError, match=r"plus_one for a caller of bind\(\) that named no model; binding"):
        slot.bind(plus_two)


def test_a_module_level_slot_is_free_once_its_models_are_gone():
    slot, model = OpSlot("rms_norm", "standard"), Norm()
    slot.bind(plus_one, holder=model)
    del model
    gc.collect()
    slot.bind(plus_two, holder=Norm())
    assert slot.bound_kernel() is plus_two


def test_an_empty_slot_and_a_wrong_kernel_are_answered():
    with pytest.raises(BindingError, match="is empty: guard the call"):
        OpSlot("rms_norm", "standard")(X)
    with pytest.raises(BindingError, match="a kernel must be callable, not a int"):
        OpSlot("rms_norm", "standard").bind(3)
