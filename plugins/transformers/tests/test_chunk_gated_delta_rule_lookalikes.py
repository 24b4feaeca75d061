"""Functions named as ``chunk_gated_delta_rule``'s: what is bound, and what computes something else and stays eager."""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next

from counting_kernels import calls, counting_registry
from delta_rule_models import ALONE, OP, delta_sites
from veomni_core import bind

# What a modeling file of transformers 5.2 has where no package is installed: a global of the attribute's name too.
chunk_gated_delta_rule = None
torch_chunk_gated_delta_rule = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)


class Mixer(nn.Module):
    """A layer as in transformers 5.2: ``__init__`` sets the function that it calls."""

    def __init__(self, function):
        super().__init__()
        self.in_proj = nn.Linear(16, 2 * 8 * 3)
        self.gates = nn.Linear(16, 4)
        self.chunk_gated_delta_rule = function

    def forward(self, x):
        q, k, v = self.in_proj(x).unflatten(-1, (3, 2, 8)).unbind(2)
        g, beta = self.gates(x).chunk(2, dim=-1)
        return self.chunk_gated_delta_rule(q, k, v, g=-F.softplus(g), beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)


def test_a_function_that_init_sets_is_bound_on_the_layer():
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixer(modeling_qwen3_next.torch_chunk_gated_delta_rule)), torch.randn(2, 9, 16)
    [site] = delta_sites(model)
    assert (site.variant, dict(site.detail)) == ("standard", {"attribute": OP})
    wanted = model(x)[0]
    calls.clear()
    with bind(model, {"preset": "eager", f"{OP}_implementation": "one"}, registry=counting_registry("one", ops=(OP,))):
        torch.testing.assert_close(model(x)[0], wanted)
    assert calls[(OP, "standard", "one")] == 1
    assert torch.equal(model(x)[0], wanted) and sum(calls.values()) == 1


@pytest.fixture
def packages(monkeypatch):
    """A function of a package for GPUs, which has it under its name."""

    def packages(*args, **kwargs):
        raise AssertionError

    packages.__module__ = "fla.ops.planted"
    module = ModuleType(packages.__module__)
    module.packages = packages
    monkeypatch.setitem(sys.modules, packages.__module__, module)
    return packages


def test_a_packages_function_that_init_sets_is_bound_where_the_file_has_its_own(packages):
    model = nn.Sequential(Mixer(packages))
    [site] = delta_sites(model)
    assert site.variant == "standard" and site.own == "fla.ops.planted.packages"
    with bind(model, ALONE):
        model(torch.randn(1, 5, 16))


def doubled(function):
    """A decorator of somebody's, which ``functools.wraps`` gives the name and the module of what it decorates."""

    @functools.wraps(function)
    def twice(*args, **kwargs):
        output, state = function(*args, **kwargs)
        return 2 * output, state

    return twice


def test_a_decorated_function_is_compared_as_it_runs():
    """What is beneath the decorator gives the reference's values, and the model runs something else."""
    for own in (torch_chunk_gated_delta_rule, modeling_qwen3_next.torch_chunk_gated_delta_rule):
        [site] = delta_sites(nn.Sequential(Mixer(doubled(own))))
        assert site.variant is None and "no variant fits" in site.evidence


def test_a_decorated_function_of_a_package_is_none_of_the_packages(packages):
    [site] = delta_sites(nn.Sequential(Mixer(doubled(packages))))
    assert site.variant is None


def test_a_function_from_elsewhere_is_compared_itself():
    def somebodys(*args, **kwargs):
        output, state = torch_chunk_gated_delta_rule(*args, **kwargs)
        return 2 * output, state

    somebodys.__module__ = "acme.kernels"
    [site] = delta_sites(nn.Sequential(Mixer(somebodys)))
    assert site.variant is None and site.own == "acme.kernels.somebodys"


def of_own(*, spoil):
    """Transformers' function with its arguments changed by ``spoil``."""

    own = torch_chunk_gated_delta_rule

    def spoiled(query, key, value, g, beta, **kwargs):
        return own(**spoil(query=query, key=key, value=value, g=g, beta=beta), **kwargs)

    return spoiled


def _as_they_are(query, key, value, g, beta):
    return {"query": query, "key": key, "value": value, "g": g, "beta": beta}


def test_what_spoils_nothing_is_bound():
    [site] = delta_sites(nn.Sequential(Mixer(of_own(spoil=_as_they_are))))
    assert site.variant == "standard"


def _a_cap(query, key, value, g, beta):
    if query.shape[1] > 1000:
        g = g.clamp(min=-1.0)
    return _as_they_are(query, key, value, g, beta)


LOOKALIKES = {
    "no decay": (lambda g, **others: {"g": torch.zeros_like(g), **others}, "no variant fits"),
    "a bounded decay": (lambda g, **others: {"g": g.clamp(min=-2.0), **others}, "no variant fits"),
    "keys that count once more": (lambda key, **others: {"key": 1.01 * key, **others}, "no variant fits"),
    "no gradient of beta": (lambda beta, **others: {"beta": beta.detach(), **others}, "no variant fits"),
    "another rule for long sequences": (_a_cap, "_a_cap chooses by shape"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_function_of_this_name_that_computes_something_else_stays_eager(name):
    spoil, words = LOOKALIKES[name]
    [site] = delta_sites(nn.Sequential(Mixer(of_own(spoil=spoil))))
    assert site.variant is None and words in site.evidence


def test_a_package_whose_file_has_no_code_of_its_own_stays_eager(packages, monkeypatch):
    monkeypatch.delitem(globals(), "torch_chunk_gated_delta_rule")
    [site] = delta_sites(nn.Sequential(Mixer(packages)))
    assert (site.variant, site.examined) == (None, False)
    assert "the model runs fla.ops.planted.packages" in site.evidence
