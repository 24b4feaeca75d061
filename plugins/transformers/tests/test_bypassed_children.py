"""Activations that a kernel computes itself: whatever replaces one or hooks it, in whichever way, is not lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from transformers.activations import ACT2FN, SiLUActivation

from hybrid_models import hybrid
from models import build, step
from veomni_core import bind, binding_of
from veomni_core.errors import CodeChangedWarning, SiteChangedError
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


# Own code that makes its activation at each call, ACT2FN[self.activation], and keeps it nowhere: the sites of a family.
MAKING = {
    "mamba": {"mixer": "causal_conv1d"},
    "bamba": {"mamba": "causal_conv1d"},
    "qwen3_next": {"linear_attn": "causal_conv1d", "linear_attn.norm": "rms_norm_gated"},
}
OF_MAKERS = {"preset": "auto"}


def makers_in(model, family):
    named = [(path, op) for path, _ in model.named_modules() for name, op in MAKING[family].items() if at(path, name)]
    assert {op for _, op in named} == {*MAKING[family].values()}
    return named


def at(path, name):
    return path.endswith(f".{name}")


@pytest.mark.parametrize("family", MAKING)
def test_an_activation_that_is_made_at_each_call_is_watched(family, monkeypatch):
    model = hybrid(family)
    binding = bind(model, OF_MAKERS)
    home = __import__(type(model).__module__, fromlist=["*"])
    former = SiLUActivation.forward
    for what, patch in {
        "ACT2FN['silu'] was replaced": lambda patched: patched.setitem(ACT2FN, "silu", nn.Tanh),
        "ACT2FN was replaced": lambda patched: patched.setattr(home, "ACT2FN", dict(ACT2FN)),
        "SiLUActivation.forward was replaced": lambda patched: patched.setattr(
            SiLUActivation, "forward", lambda self, x: former(self, x) * 0.3
        ),
    }.items():
        with monkeypatch.context() as patched:
            patch(patched)
            with pytest.warns(CodeChangedWarning, match=what.replace("[", r"\[")):
                model.train()
            for path, op in makers_in(model, family):
                assert what in binding.receipt.changed[path] and f"the proof of {op}" in binding.receipt.changed[path]
        assert not binding.receipt.changed
    monkeypatch.setitem(ACT2FN, "gelu", nn.Tanh)
    assert not binding.receipt.changed, "of another name"


@pytest.mark.parametrize("family", MAKING)
def test_a_hook_of_all_modules_reaches_an_activation_that_is_made_at_each_call(family):
    model, eager = hybrid(family), hybrid(family)
    binding = bind(model, OF_MAKERS)
    handle = nn_module.register_module_forward_hook(
        lambda module, inputs, output: output * 0.3 if isinstance(module, SiLUActivation) else None
    )
    try:
        changed = binding.receipt.changed
        assert all("hooks of all modules" in changed.get(path, "") for path, _ in makers_in(model, family)), changed
        assert_close(step(model), step(eager))
    finally:
        handle.remove()
    assert not {path for path, _ in makers_in(model, family)} & binding.receipt.changed.keys()
    assert_close(step(model), step(eager))


def test_a_convolution_without_an_activation_is_not_said_to_lose_hooks(monkeypatch):
    model = hybrid("lfm2")
    binding = bind(model, OF_MAKERS)
    conv = next(path for path, _ in model.named_modules() if at(path, "conv"))
    monkeypatch.setitem(ACT2FN, "silu", nn.Tanh)
    handle = nn_module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert conv not in binding.receipt.changed
    finally:
        handle.remove()


def assert_close(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4)
