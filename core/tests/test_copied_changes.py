"""Copies of bound modules: shallow, deep, replicas, pickled, and under torch's parametrizations."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from models import assert_same_bits, build, step
from scaled_modules import Scale, Twice, bound, plus_one, times, value
from veomni_core import bind, binding_of
from veomni_core.changes.bound_subclass import made_by
from veomni_core.changes.change import ForwardChange
from veomni_core.errors import BoundModelPickleError, SiteChangedError


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, nn.Module._replicate_for_data_parallel])
def test_a_copy_runs_its_own_weight_and_undo_reaches_it(make_copy):
    module = Scale()
    changes = bound(module, times(10), guarded=["eps"])
    duplicate = make_copy(module)
    duplicate._parameters = {"weight": nn.Parameter(torch.tensor([3.0]))}
    assert (value(duplicate), value(module)) == (30, 20)
    changes.revert()
    assert (value(duplicate), value(module)) == (3, 2)
    assert made_by(duplicate) is None
    if make_copy is not nn.Module._replicate_for_data_parallel:  # a replica lives for one forward
        assert type(duplicate) is Scale


def test_pickling_is_refused_while_bound_and_works_after_undo_in_copies_too():
    module = Scale()
    changes = bound(module, times(10))
    duplicate, by_hand = copy.deepcopy(module), object.__new__(type(module))
    vars(by_hand).update(vars(module))
    for each in (module, duplicate, by_hand):
        with pytest.raises(BoundModelPickleError, match="undo"):
            pickle.dumps(each)
    changes.revert()
    for each in (module, duplicate, by_hand):
        restored = pickle.loads(pickle.dumps(each))
        assert type(restored) is Scale and value(restored) == 2


def test_a_set_that_is_copied_with_its_module_owns_the_copy():
    module = Scale()
    changes = bound(module, times(10), guarded=["eps"])
    changes.apply(ForwardChange(module, plus_one(type(module).forward), ["eps"]), "it", "another rule")
    with pytest.raises(SiteChangedError):
        module.eps = 1.0
    twin, twin_changes = copy.deepcopy((module, changes))
    twin_changes.revert()
    assert type(twin) is Scale and (value(twin), value(module)) == (2, 21)
    again, again_changes = copy.deepcopy((module, changes))
    changes.revert()
    assert type(module) is Scale and (value(again), value(module)) == (21, 2)
    again_changes.revert()
    assert value(again) == 2


def test_a_parametrization_over_a_bound_module_is_copied_and_undone():
    module = Scale()
    changes = bound(module, times(10))
    parametrize.register_parametrization(module, "weight", Twice())
    assert value(module) == 40
    twin, twin_changes = copy.deepcopy((module, changes))
    changes.revert()
    assert (value(module), value(twin)) == (4, 40)
    twin_changes.revert()
    assert value(twin) == 4
    parametrize.remove_parametrizations(module, "weight")
    assert value(module) == 4


def test_a_bound_module_over_a_parametrization():
    module = Scale()
    parametrize.register_parametrization(module, "weight", Twice())
    kind = type(module)
    changes = bound(module, times(10))
    assert value(module) == value(copy.deepcopy(module)) == 40
    changes.revert()
    assert type(module) is kind and value(module) == 4


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.thorough)])
def test_what_the_class_of_a_bound_module_makes_is_not_bound(family):
    """Its settings are other ones than the proven, and no binding undoes it."""
    model, eager = build(family), build(family)
    binding = bind(model, {"preset": "auto"})
    made, wanted = type(model)(model.config), type(eager)(eager.config)
    made.load_state_dict(wanted.state_dict())
    assert binding_of(made) is None and binding_of(model) is binding
    assert_same_bits(step(made.train()), step(wanted.train()))
    norm, plain = type(model.model.norm)(32, eps=0.5), type(eager.model.norm)(32, eps=0.5)
    x = torch.randn(2, 32)
    assert torch.equal(norm(x), plain(x))
    assert binding_of(copy.deepcopy(model)) and type(copy.copy(model.model.norm)) is type(model.model.norm)


def test_a_class_derived_from_that_of_a_bound_module_takes_its_arguments():
    model = build("llama")
    bind(model, {"preset": "eager", "rms_norm_implementation": "torch"})

    class Named(type(model.model.norm)):
        def __init__(self, width, name):
            nn.Module.__init__(self)
            self.weight, self.name = nn.Parameter(torch.ones(width)), name

    assert Named(32, "last").name == "last"
