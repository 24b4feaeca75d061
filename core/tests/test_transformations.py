"""Transformations of any kind: stacked, undone from the top, copied, listed in the receipt, and never pickled."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref

import pytest
from torch import nn

from counting_kernels import counting_registry
from models import assert_same_bits, build, step
from scaled_modules import Scale, plus_one, times, value
from veomni_core import bind, binding_of
from veomni_core.changes.bound_subclass import NO_PICKLE
from veomni_core.changes.change import AttributeChange, ForwardChange
from veomni_core.changes.transformation import Transformation, transformations_of
from veomni_core.errors import BindingError, BoundModelPickleError

REGISTRY = counting_registry("one")
NORMS = {"preset": "eager", "rms_norm_implementation": "one"}


class Scaling(Transformation):
    """Multiplies a module's result."""

    name = "scaling"

    def __init__(self, model, number):
        super().__init__(model)
        self.number = number
        self.apply([("it", "a test", ForwardChange(model, times(number)))])

    def describe(self):
        return f"times {self.number}"


class Increment(Transformation):
    """Adds one to what the module's forward gives."""

    name = "increment"

    def __init__(self, model):
        super().__init__(model)
        self.apply(self.changes(model))

    def changes(self, model):
        yield "it", "a test", ForwardChange(model, plus_one(type(model).forward))

    def describe(self):
        return "by 1"


class Marked(Transformation):
    """Sets one attribute."""

    name = "mark"

    def __init__(self, model):
        super().__init__(model)
        self.apply([("", "a test", AttributeChange(model, "mark", self.name))])

    def describe(self):
        return "by one attribute"


def test_what_is_on_top_is_undone_first():
    module = Scale()
    lower = Scaling(module, 10)
    upper = Increment(module)
    assert transformations_of(module) == (lower, upper) and value(module) == 21
    with pytest.raises(
        BindingError, match=r"increment \(by 1\) was applied on top of this scaling: undo\(\) that first"
    ):
        lower.undo()
    assert lower.active and value(module) == 21
    upper.undo()
    assert not upper.active and transformations_of(module) == (lower,) and value(module) == 20
    lower.undo()
    assert (type(module), value(module)) == (Scale, 2) and list(vars(module)) == list(vars(Scale()))
    with pytest.raises(BindingError, match="this scaling is not in force: it is already undone"):
        lower.undo()


def test_as_context_managers_they_are_undone_from_the_top():
    module = Scale()
    with Scaling(module, 10), Increment(module) as upper:
        assert value(module) == 21
        upper.undo()
    assert value(module) == 2


def test_a_change_that_fails_takes_those_before_it_back():
    class Failing(Increment):
        def changes(self, model):
            yield from super().changes(model)
            raise BindingError("refused")

    module = Scale()
    lower = Scaling(module, 10)
    with pytest.raises(BindingError, match="refused"):
        Failing(module)
    assert transformations_of(module) == (lower,) and value(module) == 20


@pytest.mark.parametrize(("bound", "marked"), [("model.norm", "model"), ("model", "model.norm")])
def test_a_part_and_the_whole_that_it_is_in_are_undone_from_the_top_too(bound, marked):
    model = build("llama")
    binding = bind(model.get_submodule(bound), NORMS, registry=REGISTRY)
    mark = Marked(model.get_submodule(marked))
    with pytest.raises(BindingError, match=r"mark \(by one attribute\) was applied on top of this binding"):
        binding.undo()
    assert [name for name, _ in binding.receipt.transformations] == ["binding", "mark"]
    mark.undo()
    binding.undo()
    assert not any("_veomni_transformations" in vars(module) for module in model.modules())


def test_the_receipt_lists_what_is_in_force_in_the_order_applied():
    model = build("llama")
    binding = bind(model, NORMS, registry=REGISTRY)
    alone = binding.receipt
    assert alone.transformations == (("binding", binding.describe()),) and "In force" not in alone.table()
    with Marked(model) as mark:
        receipt = binding.receipt
        assert receipt.transformations == (("binding", binding.describe()), ("mark", "by one attribute"))
        assert receipt.to_dict()["transformations"][1] == {"name": "mark", "description": "by one attribute"}
        assert re.search(r"In force: binding: plan .*\n *In force: mark: by one attribute", receipt.table())
        assert not receipt.changed
        del model.mark
        assert binding.receipt.changed == {"the model": "LlamaForCausalLM.mark was replaced"}
        assert mark.changed() == binding.receipt.changed
    assert binding.receipt == alone


def test_a_transformation_that_was_there_before_the_binding_is_listed_before_it():
    model = build("llama")
    mark = Marked(model)
    with bind(model, NORMS, registry=REGISTRY) as binding:
        assert [name for name, _ in binding.receipt.transformations] == ["mark", "binding"]
        assert binding_of(model) is binding
        with pytest.raises(BindingError, match="on top of this mark"):
            mark.undo()
    mark.undo()


def test_what_a_transformation_on_top_changes_again_is_not_reported_as_others_doing():
    module = Scale()
    lower, upper = Marked(module), Marked(module)
    assert (lower.changed(), upper.changed()) == ({}, {})
    module.mark = "other"
    assert lower.changed() == {} and list(upper.changed()) == ["the model"]
    upper.undo()
    assert list(lower.changed()) == ["the model"] and module.mark == "other"


def test_a_deep_copy_has_transformations_of_its_own():
    module = Scale()
    lower, upper = Scaling(module, 10), Increment(module)
    twin = copy.deepcopy(module)
    twin.weight.data += 1
    assert (value(module), value(twin)) == (21, 31)
    own_lower, own_upper = transformations_of(twin)
    assert own_lower.model is twin and own_lower is not lower and own_lower.describe() == "times 10"
    with pytest.raises(BindingError, match="increment"):
        own_lower.undo()
    upper.undo()
    lower.undo()
    assert (value(module), value(twin)) == (2, 31)
    own_upper.undo()
    own_lower.undo()
    assert (type(twin), value(twin)) == (Scale, 3) and list(vars(twin)) == list(vars(Scale()))


def test_a_deep_copy_of_a_model_that_is_transformed_and_bound_is_both():
    model, eager = build("llama"), build("llama")
    lower = Marked(model)
    binding = bind(model, NORMS, registry=REGISTRY)
    upper = Increment(model.model.norm)
    twin = copy.deepcopy(model)
    for each in (upper, binding, lower):
        each.undo()
    assert_same_bits(step(model), step(eager))
    assert [each.name for each in transformations_of(twin)] == ["mark", "binding", "increment"]
    assert binding_of(twin).model is twin and binding_of(twin).receipt.changed == {}
    for each in reversed(transformations_of(twin)):
        each.undo()
    assert [type(module) for module in twin.modules()] == [type(module) for module in eager.modules()]
    assert_same_bits(step(twin), step(eager))


def test_pickling_is_refused_with_the_same_sentence():
    model = build("llama")
    binding = bind(model, NORMS, registry=REGISTRY)
    mark = Marked(model)
    for each in (model, model.model.norm, binding, mark, Increment(Scale()), Scaling(Scale(), 2)):
        with pytest.raises(BoundModelPickleError, match=f"^{re.escape(NO_PICKLE)}$"):
            pickle.dumps(each)
    mark.undo()
    binding.undo()
    pickle.dumps(model)


def test_a_transformation_keeps_no_model_alive():
    module = nn.Sequential(Scale())
    transformation = Marked(module)
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()
    assert not transformation.active and transformation.changed() == {}
    with pytest.raises(BindingError, match="the model of this mark was freed"):
        _ = transformation.model
