"""Code that is replaced after bind, and that a proof has read: seen when training starts, and while it is replaced."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models import build, tokens
from veomni_core import bind
from veomni_core.changes.bound_subclass import eager_class
from veomni_core.errors import CodeChangedWarning

AUTO = {"preset": "auto"}
FEW = pytest.mark.thorough(one_per=[])
FAMILIES = ["llama", "qwen3_moe", *(pytest.param(each, marks=FEW) for each in ("gemma3_text", "phi3", "mixtral"))]


def other(*args, **kwargs):
    return args[0]


def home_of(model):
    return __import__(type(model).__module__, fromlist=["*"])


def class_of(model, ending):
    return eager_class(next(type(m) for path, m in model.named_modules() if path.endswith(ending)))


def activation_of(model):
    return next(
        class_of(model, name)
        for name in ("act_fn", "activation_fn")
        if any(p.endswith(name) for p, _ in model.named_modules())
    )


# What is replaced, and the op whose site has read it; None where the model has no such code.
PLACES = {
    "a norm's forward": lambda m: (class_of(m, "model.norm"), "forward", "rms_norm"),
    "an activation's forward": lambda m: (activation_of(m), "forward", ""),
    "the head's forward": lambda m: (nn.Linear, "forward", "cross_entropy_loss"),
    "the model's forward": lambda m: (class_of(m, ""), "forward", "cross_entropy_loss"),
    "the attention's forward": lambda m: (class_of(m, "self_attn"), "forward", "attention"),
    "a function of the file": lambda m: (home_of(m), "rotate_half", "attention"),
    "torch's function": lambda m: (torch, "rsqrt", "rms_norm"),
    "a method of tensors": lambda m: (torch.Tensor, "pow", "rms_norm"),
    "a function of masks": lambda m: (home_of(m), "create_causal_mask", "attention"),
}
OF_EXPERTS = {
    "the load-balancing function": lambda m: (home_of(m), "load_balancing_loss_func", "load_balancing_loss"),
    "the experts' forward": lambda m: (class_of(m, "experts"), "forward", "moe_experts"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_code_is_seen_when_training_starts_and_only_while_it_is_replaced(family, monkeypatch):
    model = build(family)
    binding, wrong = bind(model, AUTO), []
    places = {**PLACES, **(OF_EXPERTS if "experts" in str(model) else {})}
    for name, place in places.items():
        holder, attribute, op = place(model)
        with monkeypatch.context() as patch:
            patch.setattr(holder, attribute, other)
            with pytest.warns(CodeChangedWarning, match=f"{attribute} was replaced, which .*the proof of {op}"):
                model.train()
            seen = [what for what in binding.receipt.changed.values() if f"{attribute} was replaced after bind" in what]
            wrong += [] if any(f"proof of {op}" in what for what in seen) else [name]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model.train(), binding.receipt, model.eval()
        wrong += [name] if binding.receipt.changed else []
    assert not wrong


def test_entries_of_transformers_tables_are_seen(monkeypatch):
    model = build("llama")
    binding = bind(model, AUTO)
    for table, key in (
        (ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa"),
        (ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa"),
        (LOSS_MAPPING, "ForCausalLM"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(table, key, other)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert f"['{key}'] was replaced after bind" in binding.receipt.changed["the model"]
        assert not binding.receipt.changed


def test_a_function_whose_code_was_changed_in_place_is_seen(monkeypatch):
    model = build("llama")
    binding = bind(model, AUTO)
    monkeypatch.setattr(home_of(model).rotate_half, "__code__", (lambda x: x).__code__)
    with pytest.warns(CodeChangedWarning, match=r"the code of modeling_llama\.rotate_half was changed"):
        assert binding.receipt.changed


def test_code_that_no_proof_read_is_not_watched(monkeypatch):
    """Of another family, of torch's modules that stay eager, and what only the constructor calls."""
    model, unrelated = build("llama"), build("gemma3_text")
    binding = bind(model, AUTO)
    monkeypatch.setattr(type(unrelated.model.norm), "forward", other)
    monkeypatch.setattr(nn.Embedding, "forward", other)
    monkeypatch.setattr(nn.GELU, "forward", other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
    assert not binding.receipt.changed


def test_only_bound_sites_have_read_code(monkeypatch):
    model = build("llama")
    binding = bind(model, {"preset": "eager", "rms_norm_implementation": "auto"})
    monkeypatch.setattr(nn.Linear, "forward", other)
    assert not binding.receipt.changed
    monkeypatch.setattr(class_of(model, "model.norm"), "forward", other)
    with pytest.warns(CodeChangedWarning):
        assert {*binding.receipt.changed} == {
            decision.site.path for op in binding.plan.ops for decision in op.sites if decision.bound
        }


def test_a_copy_looks_too_and_an_undone_model_does_not(monkeypatch):
    model = build("llama")
    binding = bind(model, AUTO)
    twin = copy.deepcopy(model)
    monkeypatch.setattr(nn.Linear, "forward", other)
    with pytest.warns(CodeChangedWarning):
        twin.train()
    binding.undo()
    assert not binding.receipt.changed and type(model) is eager_class(type(model))


def test_a_wrapped_model_looks(monkeypatch):
    model = build("llama")
    bind(model, AUTO)
    monkeypatch.setattr(nn.Linear, "forward", other)
    with pytest.warns(CodeChangedWarning):
        nn.ModuleDict({"wrapped": model}).train()


def test_a_forward_does_not_look(monkeypatch):
    model = build("llama")
    binding = bind(model, AUTO)
    monkeypatch.setattr(binding._code, "changed", lambda: pytest.fail("a forward looked"))
    model(input_ids=tokens(), labels=tokens()).loss.backward()


@pytest.mark.parametrize("way", ["__dict__", "object.__setattr__", "update"])
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=FEW) for each in ("gemma3_text", "mixtral", "olmo2", "deepseek_v3"))]
)
def test_a_setting_that_is_written_past_the_guard_is_seen_when_training_starts(family, way):
    model = build(family)
    binding = bind(model, AUTO)
    norm = next(module for path, module in model.named_modules() if path.endswith("post_attention_layernorm"))
    name = next(each for each in ("variance_epsilon", "eps") if each in vars(norm))
    former = vars(norm)[name]
    ways = {
        "__dict__": lambda: vars(norm).__setitem__(name, 0.5),
        "object.__setattr__": lambda: object.__setattr__(norm, name, 0.5),
        "update": lambda: norm.__dict__.update({name: 0.5}),
    }
    ways[way]()
    with pytest.warns(CodeChangedWarning, match=rf"its {name} was set from .* to 0\.5 past the guard after bind"):
        model.train()
    assert "past the guard" in binding.receipt.changed["model.layers.0.post_attention_layernorm"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
        vars(norm)[name] = former
        assert not binding.receipt.changed
