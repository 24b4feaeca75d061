"""Activations that a kernel computes itself: whatever replaces one or hooks it, in whichever way, is not lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module

from models import build, step
from veomni_core import bind, binding_of
from veomni_core.errors import SiteChangedError
from veomni_transformers.changes.bypassed_children import BYPASSED

CONFIG = {"preset": "eager", "swiglu_mlp_implementation": "auto", "moe_implementation": "auto"}
FAMILIES = ("llama", "qwen3_moe", "gemma3_text", "mixtral", "phi3")
ACTIVATION = {"phi3": "activation_fn"}


class Third(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 0.3


def scaled(module, inputs, output):
    return output * 0.3


def hook_of_all(model, holder, name):
    kind = type(holder._modules[name]).__name__
    return nn_module.register_module_forward_hook(
        lambda module, inputs, output: output * 0.3 if type(module).__name__ == kind else None
    )


def pre_hook(holder, name):
    holder._modules[name]._forward_pre_hooks[998] = lambda module, inputs: (inputs[0] * 0.3,)


def derived(kind):
    return type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x) * 0.3})


WAYS = {
    "add_module": lambda model, holder, name: holder.add_module(name, Third()),
    "register_module": lambda model, holder, name: holder.register_module(name, Third()),
    "_modules": lambda model, holder, name: holder._modules.__setitem__(name, Third()),
    "vars(module)": lambda model, holder, name: vars(holder).__setitem__(name, Third()),
    "object.__setattr__": lambda model, holder, name: object.__setattr__(holder, name, torch.tanh),
    "set_submodule": lambda model, holder, name: holder.set_submodule(name, Third()),
    "__class__": lambda model, holder, name: setattr(holder._modules[name], "__class__", Third),
    "__class__, derived from the bound one": lambda model, holder, name: setattr(
        holder._modules[name], "__class__", derived(type(holder._modules[name]))
    ),
    "vars(child)['forward']": lambda model, holder, name: vars(holder._modules[name]).__setitem__(
        "forward", lambda x: torch.relu(x) * 0.3
    ),
    "_forward_hooks": lambda model, holder, name: holder._modules[name]._forward_hooks.__setitem__(999, scaled),
    "_forward_pre_hooks": lambda model, holder, name: pre_hook(holder, name),
    "a hook of all modules": hook_of_all,
}


def holder_in(model, family):
    name = ACTIVATION.get(family, "act_fn")
    return next(each for each in model.modules() if name in each._modules), name


def cases():
    for family in FAMILIES:
        for way in WAYS:
            first = family == FAMILIES[1] or (
                family == FAMILIES[0] and way in ("_modules", "vars(module)", "a hook of all modules")
            )
            yield pytest.param(family, way, marks=() if first else pytest.mark.thorough)


@pytest.mark.parametrize(("family", "way"), list(cases()))
def test_the_site_runs_its_own_code_and_the_receipt_says_so_or_the_change_is_refused(family, way):
    model, eager = build(family), build(family)
    binding = bind(model, CONFIG)
    handle = WAYS[way](eager, *holder_in(eager, family))
    try:
        if handle is None:
            WAYS[way](model, *holder_in(model, family))
    except SiteChangedError:
        return
    try:
        assert binding.receipt.changed, "said before a step"
        found, wanted = step(model), step(eager)
        assert any("act" in why for why in binding.receipt.changed.values())
    finally:
        if handle is not None:
            handle.remove()
    assert_close(found, wanted)
    if handle is not None:
        assert_close(step(model), step(eager))


def test_a_child_in_a_copy_is_the_copys():
    model = build("llama")
    bind(model, CONFIG)
    duplicate = copy.deepcopy(model)
    holder, name = holder_in(duplicate, "llama")
    assert vars(holder)[BYPASSED][name] is holder._modules[name]
    assert_close(step(duplicate), step(build("llama")))
    assert not binding_of(duplicate).receipt.changed
    holder._modules[name] = Third()
    step(duplicate)
    assert binding_of(duplicate).receipt.changed and not binding_of(model).receipt.changed


def test_a_replica_runs_the_kernel_and_undo_leaves_nothing():
    model = build("llama")
    binding = bind(model, CONFIG)
    holder, _ = holder_in(model, "llama")
    replica = holder._replicate_for_data_parallel()
    replica._modules = {each: child._replicate_for_data_parallel() for each, child in holder._modules.items()}
    for each, child in replica._modules.items():
        vars(child).update(holder._modules[each]._parameters)
    x = torch.randn(2, 3, model.config.hidden_size)
    assert torch.equal(replica(x), holder(x)) and not binding.receipt.changed
    binding.undo()
    assert not any(BYPASSED in vars(module) for module in model.modules())


def test_a_compiled_mlp_has_no_break():
    model = build("llama")
    with bind(model, CONFIG) as binding:
        holder, _ = holder_in(model, "llama")
        x = torch.randn(2, 3, model.config.hidden_size)
        compiled = torch.compile(holder, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), holder(x))
        assert not binding.receipt.changed


def assert_close(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4)
