"""Changes on their own: layers of them, their copies, and classes that others put above or below."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from scaled_modules import Scale, X, bound, plus_one, times, value
from veomni_core.changes.bound_subclass import eager_class
from veomni_core.changes.change import AttributeChange, ForwardChange
from veomni_core.changes.change_set import ChangeSet
from veomni_core.errors import BindingError, SiteChangedError, SpecError
from veomni_transformers.changes.guard_change import GuardChange
from veomni_transformers.changes.property_change import PropertyChange


def test_a_bound_module_keeps_its_class_s_name_and_undo_gives_the_class_back():
    module = Scale()
    changes = bound(module, times(10))
    assert value(module) == 20 and isinstance(module, Scale)
    assert (type(module).__name__, type(module).__module__) == ("Scale", Scale.__module__)
    assert list(module.state_dict()) == ["weight"] and "forward" not in vars(module)
    changes.revert()
    assert type(module) is Scale and value(module) == 2


def test_a_second_change_wraps_the_first_and_both_go():
    module = Scale()
    changes = bound(module, times(10))
    changes.apply(ForwardChange(module, plus_one(type(module).forward)), "it", "another rule")
    assert value(module) == 21
    assert value(copy.deepcopy(module)) == 21
    changes.revert()
    assert type(module) is Scale and value(module) == 2


def test_modules_that_are_bound_alike_share_a_class():
    one, two, other = Scale(), Scale(), Scale()
    changes = ChangeSet()
    for module, number in ((one, 10), (two, 10), (other, 11)):
        changes.apply(ForwardChange(module, times(number)))
    assert type(one) is type(two) is not type(other)
    assert eager_class(type(one)) is Scale


def test_regional_compilation_compiles_layers_that_are_bound_alike_once():
    torch._dynamo.reset()
    layers = nn.ModuleList(nn.Sequential(Scale(), nn.ReLU()) for _ in range(4))
    changes = ChangeSet()
    for layer in layers:
        changes.apply(ForwardChange(layer[0], times(10)))
        layer.compile(backend="eager", fullgraph=True)
    layers[0](X)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [float(layer(X)) for layer in layers] == [20.0] * 4


def test_a_class_that_others_put_over_ours_as_fsdp2_does_stays_and_loses_the_kernel():
    module = Scale()
    changes = bound(module, times(10))
    module.__class__ = sharded = type("FSDPScale", (type(module),), {})
    assert value(module) == 20
    assert not list(changes.changed())
    changes.revert()
    assert type(module) is sharded and value(module) == 2


def test_a_class_that_replaces_ours_is_reported_and_left():
    module = Scale()
    changes = bound(module, times(10))
    module.__class__ = other = type("Other", (Scale,), {})
    assert list(changes.changed()) == [("it", "its class became Other")]
    changes.revert()
    assert type(module) is other


def test_a_guarded_setting_raises_before_it_is_written():
    module = Scale()
    bound(module, times(10), guarded=["eps"])
    module.eps = 0.0  # no change
    module.other = 1
    with pytest.raises(SiteChangedError, match=r"it: eps was changed after bind.*undo\(\) first.*on_change: eager"):
        module.eps = 1.0
    with pytest.raises(SiteChangedError):
        del module.eps
    assert module.eps == 0.0 and value(module) == 20


@pytest.mark.parametrize("above", ["nothing", "another change", "fsdp2", "a forward that keeps ours"])
def test_a_guarded_setting_puts_the_module_back_to_its_own_code_where_that_is_asked(above, caplog):
    module = Scale()
    changes = bound(module, times(10), guarded=["eps"], on_change="eager")
    if above == "another change":
        changes.apply(ForwardChange(module, plus_one(type(module).forward)), "it", "a rule")
    elif above == "fsdp2":
        module.__class__ = type("FSDPScale", (type(module),), {})
    elif above == "a forward that keeps ours":
        module._old_forward = module.forward
        module.forward = lambda x: module._old_forward(x)
    module.eps = 1.0
    module.eps = 2.0
    assert value(module) == 4
    assert [path for path, _ in changes.changed()] == ["it"]
    assert caplog.text.count("it runs its own code from now on: eps was changed after bind") == 1
    changes.revert()
    assert value(module) == 4


@pytest.mark.parametrize("on_change", ["raise", "eager"])
def test_a_change_of_a_child_that_is_guarded_is_a_change_of_its_owner(on_change):
    holder = nn.ModuleDict({"mlp": Scale()})
    module = holder["mlp"]
    module.act = child = nn.LeakyReLU(0.1)
    changes = ChangeSet(on_change)
    changes.apply(ForwardChange(module, times(10)), "mlp", "a rule")
    changes.apply(GuardChange(module, "act", child, ["negative_slope"]), "mlp", "a rule")
    if on_change == "raise":
        with pytest.raises(SiteChangedError, match="mlp.act: negative_slope was changed after bind"):
            child.negative_slope = 0.2
        assert value(module) == 20
    else:
        child.negative_slope = 0.2
        assert value(module) == 2 and type(child) is nn.LeakyReLU
        assert dict(changes.changed()).keys() == {"mlp"}
    changes.revert()
    assert (type(module), type(child)) == (Scale, nn.LeakyReLU)


def test_undo_reaches_what_was_put_over_a_forward_and_kept_it():
    accelerate = pytest.importorskip("accelerate.hooks")
    from accelerate.utils.operations import convert_outputs_to_fp32

    hooked, converted = Scale(), Scale()
    changes = ChangeSet()
    for module in (hooked, converted):
        changes.apply(ForwardChange(module, times(10)))
    accelerate.add_hook_to_module(hooked, accelerate.ModelHook())
    converted.forward = convert_outputs_to_fp32(converted.forward)
    assert (value(hooked), value(converted)) == (20, 20)
    changes.revert()
    assert (value(hooked), value(converted)) == (2, 2)
    accelerate.remove_hook_from_module(hooked)
    assert value(hooked) == 2


def test_a_forward_of_the_instance_s_own_is_not_bound_beneath():
    accelerate = pytest.importorskip("accelerate.hooks")
    hooked, closed = Scale(), Scale()
    accelerate.add_hook_to_module(hooked, accelerate.ModelHook())
    closed.forward = lambda x: x
    for module, setter in ((hooked, "set by accelerate's ModelHook"), (closed, "set to .*lambda")):
        with pytest.raises(BindingError, match=rf"it \(Scale\) has a forward of its own, {setter}"):
            bound(module, times(10))


def test_a_property_stands_before_what_the_instance_holds():
    module = Scale()
    changes = ChangeSet()
    changes.apply(PropertyChange(module, "eps", 5.0))
    duplicate = copy.deepcopy(module)
    assert (value(module), value(duplicate)) == (7, 7)
    changes.revert()
    assert (value(module), value(duplicate)) == (2, 2)


def test_an_attribute_is_put_back_unless_somebody_has_set_it_since():
    module = Scale()
    changes = ChangeSet()
    for name in ("eps", "fresh", "mine"):
        changes.apply(AttributeChange(module, name, 5.0))
    module.mine = 6.0
    changes.revert()
    assert (module.eps, module.mine) == (0.0, 6.0) and not hasattr(module, "fresh")


def test_a_forward_that_holds_its_module_is_refused():
    module = Scale()
    for forward in (lambda self, x: module(x), module.forward, lambda self, x, other=module: other(x)):
        with pytest.raises(SpecError, match=r"'norms' .*holds a module \(Scale\).* function of \(self, ...\)"):
            ChangeSet().apply(ForwardChange(module, forward), "it", "the rule 'norms' (rms_norm_implementation)")
    with pytest.raises(SpecError, match="Yield a veomni_core.authoring.ForwardChange instead"):
        ChangeSet().apply(AttributeChange(module, "forward", abs), "it", "a rule")
    assert type(module) is Scale


def test_a_module_and_its_changes_are_freed_without_the_garbage_collector():
    module = Scale()
    changes = bound(module, times(10), guarded=["eps"])
    changes.apply(AttributeChange(module, "mark", object()))
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()
    assert not list(changes.changed())
    copy.deepcopy(changes).revert()
    changes.revert()
