"""After bind: a changed setting is said, calls keep the module's own signature, and nothing but the model's changes."""

from __future__ import annotations

import copy
import random
import sys

import numpy
import pytest
import torch
import transformers
from lookalikes import REGISTRY, PlainExperts, PlainMLP, PlainRMSNorm, gated, normed, routed, varied
from torch import nn

from counting_kernels import calls
from models import FAMILIES, build
from veomni_core import bind, binding_of, find_sites
from veomni_core.errors import SiteChangedError

CONFIG = {"preset": "eager", **dict.fromkeys(
    ("rms_norm_implementation", "swiglu_mlp_implementation", "moe_implementation"), "auto"
)}  # fmt: skip
X = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(5))
ROUTES = torch.arange(14).view(7, 2) % 4, torch.full((7, 2), 0.5)


def _norm(module):
    return module(X * 1e-3)


def _experts(module):
    return module(X[0], *ROUTES)


class Beta(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def _mlp_with_beta():
    module = PlainMLP()
    module.act_fn = Beta()
    return module


CHANGES = {
    "a norm's eps": (PlainRMSNorm, _norm, lambda m: setattr(m, "variance_epsilon", 1e-2)),
    "a norm's own setting": (
        lambda: varied("rms_norm", lambda self, x: normed(self, x) * self.scale, scale=1.0),
        _norm,
        lambda m: setattr(m, "scale", 2.0),
    ),
    "an MLP's activation": (PlainMLP, lambda m: m(X), lambda m: setattr(m, "act_fn", nn.GELU())),
    "a setting of an MLP's activation": (_mlp_with_beta, lambda m: m(X), lambda m: setattr(m.act_fn, "beta", 1.7)),
    "the forward of an MLP's activation": (
        PlainMLP,
        lambda m: m(X),
        lambda m: setattr(m.act_fn, "forward", torch.nn.functional.gelu),
    ),
    "a hook on an MLP's activation": (
        PlainMLP,
        lambda m: m(X),
        lambda m: m.act_fn.register_forward_hook(lambda module, inputs, output: output * 2),
    ),
    "experts' activation": (PlainExperts, _experts, lambda m: setattr(m, "act_fn", nn.GELU())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_a_proof_rests_on_raises(name):
    make, _, change = CHANGES[name]
    model = nn.Sequential(make())
    with bind(model, CONFIG, registry=REGISTRY), pytest.raises(SiteChangedError, match="was changed after bind"):
        change(model[0])
    change(model[0])


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_a_proof_rests_on_can_put_the_site_back_to_its_own_code(name):
    make, run, change = CHANGES[name]
    model = nn.Sequential(make())
    eager = copy.deepcopy(model)
    binding = bind(model, CONFIG, registry=REGISTRY, on_change="eager")
    change(model[0]), change(eager[0])
    calls.clear()
    assert torch.equal(run(model[0]), run(eager[0]))
    assert not calls
    assert list(binding.receipt.changed) == ["0"]
    binding.undo()
    assert torch.equal(run(model[0]), run(eager[0]))


def test_a_copy_guards_its_own_activation():
    model = nn.Sequential(_mlp_with_beta())
    bind(model, CONFIG, registry=REGISTRY)
    duplicate = copy.deepcopy(model)
    binding_of(model).undo()
    model[0].act_fn.beta = 1.7
    with pytest.raises(SiteChangedError, match=r"0\.act_fn: beta was changed"):
        duplicate[0].act_fn.beta = 1.7


CALLS = {
    "a keyword": (lambda self, x: normed(self, x), lambda m: m(x=X), True),
    "another name": (lambda self, states: normed(self, states), lambda m: m(states=X), True),
    "an argument at its default": (
        lambda self, x, residual=None: normed(self, x if residual is None else x + residual),
        lambda m: m(X, residual=None),
        True,
    ),
    "an argument that is set": (
        lambda self, x, residual=None: normed(self, x if residual is None else x + residual),
        lambda m: m(X, X),
        False,
    ),
    "any keyword": (lambda self, x, **kwargs: normed(self, x), lambda m: m(X, anything=1), False),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bound_module_is_called_as_it_was(name):
    forward, call, by_the_kernel = CALLS[name]
    model = nn.Sequential(varied("rms_norm", forward))
    wanted = call(model[0])
    with bind(model, CONFIG, registry=REGISTRY) as binding:
        calls.clear()
        assert torch.equal(call(model[0]), wanted)
        assert bool(calls) is by_the_kernel
        assert bool(binding.receipt.changed) is not by_the_kernel


def test_mlps_and_experts_keep_their_arguments_names():
    mlp = varied("swiglu_mlp", lambda self, hidden_states, scale=1.0: gated(self, hidden_states) * scale)
    experts = varied("moe_experts", lambda self, rows, router_indices, routing_weights: routed(
        self, rows, router_indices, routing_weights
    ))  # fmt: skip
    model = nn.Sequential(mlp, experts)
    run = [lambda: mlp(hidden_states=X), lambda: mlp(X, scale=2.0)]
    run += [lambda: experts(rows=X[0], router_indices=ROUTES[0], routing_weights=ROUTES[1])]
    wanted = [each() for each in run]
    with bind(model, CONFIG, registry=REGISTRY):
        torch.testing.assert_close([each() for each in run], wanted)


def test_a_module_that_asks_for_more_than_the_contract_is_not_proven():
    model = nn.Sequential(varied("rms_norm", lambda self, x, residual: normed(self, x + residual)))
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "rms_norm"]
    assert site.variant is None
    assert "its forward also requires residual" in site.evidence


def _state(model):
    """Everything that finding sites might change, in the model and in the process."""
    tensors = {
        name: (tensor, tensor._version, tensor.detach().clone(), tensor.grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    modules = [(name, type(module), module.training, dict(vars(module))) for name, module in model.named_modules()]
    process = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "trace": sys.gettrace(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": sorted(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()),
        "verbosity": transformers.logging.get_verbosity(),
    }
    return tensors, modules, process, model.config.to_dict()


def _assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [True, False])
def test_finding_sites_changes_nothing(family, training):
    model = build(family).train(training)
    tensors, modules, process, config = _state(model)
    find_sites(model, REGISTRY)
    tensors_after, modules_after, process_after, config_after = _state(model)
    assert tensors_after.keys() == tensors.keys()
    for name, (tensor, version, values, gradient) in tensors.items():
        assert tensors_after[name][0] is tensor, name
        assert tensors_after[name][1] == version and torch.equal(tensor, values), name
        assert tensors_after[name][3] is gradient, name
    assert modules_after == modules
    _assert_same(process_after, process)
    assert config_after == config


def test_no_generator_of_another_device_is_seeded(monkeypatch):
    model = build("qwen3_moe")
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the CUDA generators were seeded"))
    find_sites(model, REGISTRY)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_proofs_are_the_same_whatever_the_process_has_set(family):
    model = build(family)
    wanted = find_sites(model, REGISTRY)
    with torch.inference_mode():
        assert find_sites(model, REGISTRY) == wanted
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert find_sites(model, REGISTRY) == wanted
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert find_sites(model, REGISTRY) == wanted
    finally:
        torch.set_default_dtype(torch.float32)


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        self.seen.append(x.shape)
        return x


def test_an_observer_in_the_model_sees_nothing_of_the_proofs():
    observer = Observer()
    model = nn.Sequential(varied("swiglu_mlp", lambda self, x: self.observer(gated(self, x)), observer=observer))
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "swiglu_mlp"]
    assert site.variant is None
    assert observer.largest == 0 and not observer.seen
