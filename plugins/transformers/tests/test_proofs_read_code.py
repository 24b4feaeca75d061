"""Code is read before it is proven: what depends on something that nobody sees change, or changes something, is not."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from lookalikes import REGISTRY, PlainExperts, PlainMLP, PlainRMSNorm, gated, normed, routed, sites, variants, varied
from torch import nn
from torch.nn import functional as F

from models import build
from veomni_core import find_sites


class Settings:
    multiplier = 1.0


NORMS = {
    "a dict": (lambda self, x: normed(self, x) * self.settings["by"], {"settings": {"by": 1.0}}, "settings, a dict"),
    "an object": (lambda self, x: normed(self, x) * self.by.multiplier, {"by": Settings()}, "by, a Settings"),
    "a plain tensor": (lambda self, x: normed(self, x) * self.factor, {"factor": torch.ones(())}, "factor, a Tensor"),
    "its length": (lambda self, x: normed(self, x) * (2 if x.shape[1] > 1024 else 1), {}, "chooses by shape"),
    "its device": (lambda self, x: normed(self, x) * (2 if x.is_cuda else 1), {}, "chooses by is_cuda"),
    "autocast": (
        lambda self, x: normed(self, x) * (2 if torch.is_autocast_enabled() else 1),
        {},
        "chooses by is_autocast_enabled",
    ),
    "its values": (lambda self, x: normed(self, x) * (2 if x.isnan().any() else 1), {}, "chooses by isnan"),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_depends_on_what_can_change_unseen_is_not_proven(name):
    forward, attributes, reason = NORMS[name]
    (site,) = sites("rms_norm", varied("rms_norm", forward, **attributes))
    assert site.variant is None
    assert reason in site.evidence


def _counts(self, x):
    self.calls = self.calls + 1
    return normed(self, x)


def _in_a_list(self, x):
    result = x * 0
    for scale in self.scales:
        result = result + normed(self, x) * scale
    return result


def test_code_that_changes_its_module_is_not_proven():
    (site,) = sites("rms_norm", varied("rms_norm", _counts, calls=0))
    assert site.variant is None
    assert "sets the attribute calls" in site.evidence
    assert variants("rms_norm", varied("rms_norm", _in_a_list, scales=[1.0])) == [None]


GLOBALS = """
from lookalikes import normed
SCALE, CALLS = 1.0, 0

def scaled(self, x):
    return normed(self, x) * SCALE

def counted(self, x):
    global CALLS
    CALLS = 1
    return normed(self, x)
"""


@pytest.mark.parametrize(
    "function, reason", [("scaled", "reads the global SCALE"), ("counted", "sets the global CALLS")]
)
def test_code_that_reads_or_sets_globals_which_can_be_rebound_is_not_proven(function, reason):
    module = ModuleType("a_model_s_code")
    exec(compile(GLOBALS, "a_model_s_code.py", "exec"), vars(module))
    (site,) = sites("rms_norm", varied("rms_norm", getattr(module, function)))
    assert site.variant is None
    assert reason in site.evidence


CAUSAL = """
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM, load_balancing_loss_func
SCALE = 1.0

class Scaled(Qwen3MoeForCausalLM):
    def forward(self, input_ids=None, labels=None):
        out = self.model(input_ids=input_ids, output_router_logits=True)
        return SCALE * load_balancing_loss_func(out.router_logits, self.config.num_experts, 2)
"""


def test_a_forward_that_would_be_cloned_must_not_read_globals_that_can_be_rebound(monkeypatch):
    module = ModuleType("another_model_s_code")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(CAUSAL, "another_model_s_code.py", "exec"), vars(module))
    model = build("qwen3_moe")
    model.__class__ = module.Scaled
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "load_balancing_loss"]
    assert site.variant is None
    assert "Scaled.forward reads the global SCALE" in site.evidence


class Doubling(ModelHook):
    def post_forward(self, module, output):
        return output * 2


def _patched(module):
    own = module.forward
    module.forward = lambda *args: own(*args) * 2
    return module


@pytest.mark.parametrize(
    "op, make",
    [
        ("rms_norm", lambda: _patched(PlainRMSNorm())),
        ("swiglu_mlp", lambda: _patched(PlainMLP())),
        ("moe_experts", lambda: _patched(PlainExperts())),
        ("rms_norm", lambda: add_hook_to_module(PlainRMSNorm(), Doubling())),
    ],
    ids=["norm", "MLP", "experts", "accelerate's hook on a norm"],
)
def test_a_forward_that_was_set_on_the_instance_is_not_proven(op, make):
    (site,) = sites(op, make())
    assert site.variant is None
    assert "its forward was set on the instance" in site.evidence


def test_an_attention_with_a_forward_of_its_own_keeps_its_rotary_function():
    model = build("llama")
    add_hook_to_module(model.model.layers[0].self_attn, Doubling())
    found = [site.variant for site in find_sites(model, REGISTRY) if site.op_name == "rotary_pos_emb"]
    assert found == [None, "full"]


class Beta(nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def _mlp_with(activation):
    module = PlainMLP()
    del module.act_fn
    object.__setattr__(module, "act_fn", activation) if not isinstance(activation, nn.Module) else setattr(
        module, "act_fn", activation
    )
    return module


@pytest.mark.parametrize(
    "activations, expected",
    [
        ((nn.GELU(), nn.GELU("tanh")), ["gelu", "gelu_tanh"]),
        ((F.silu, F.gelu), ["standard", "gelu"]),
        ((Beta(1.0), Beta(1.7)), ["standard", None]),
    ],
    ids=["a child's setting", "functions", "a child's number"],
)
def test_modules_that_differ_in_what_their_code_reads_are_proven_apart(activations, expected):
    assert variants("swiglu_mlp", *map(_mlp_with, activations)) == expected


def test_what_the_kernel_would_run_in_the_place_of_must_be_a_plain_activation():
    hooked = PlainMLP()
    hooked.act_fn.register_forward_hook(lambda module, inputs, output: output * 2)
    learned = _mlp_with(nn.PReLU())
    assert ["hooks" in site.evidence for site in sites("swiglu_mlp", hooked, learned)] == [True, False]
    assert variants("swiglu_mlp", hooked, learned) == [None, None]


def test_settings_and_optional_arguments_may_decide():
    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        return normed(self, x) * 2 if self.doubles else normed(self, x)

    assert variants("rms_norm", varied("rms_norm", forward, doubles=False)) == ["standard"]
    assert variants("rms_norm", varied("rms_norm", forward, doubles=True)) == [None]


def test_the_plain_modules_are_proven():
    assert variants("rms_norm", PlainRMSNorm(), varied("rms_norm", normed)) == ["standard"] * 2
    assert variants("swiglu_mlp", PlainMLP(), varied("swiglu_mlp", gated)) == ["standard"] * 2
    forward = lambda self, x, top_k_index, top_k_weights: routed(self, x, top_k_index, top_k_weights)  # noqa: E731
    assert variants("moe_experts", PlainExperts(), varied("moe_experts", forward)) == ["standard"] * 2
