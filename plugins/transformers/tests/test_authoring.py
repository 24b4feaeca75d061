"""What plugins are written with: every name is there, and a plugin's layout of experts is proven and bound."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from types import MappingProxyType, ModuleType

import pytest
import torch
from torch import nn

import veomni_conformance
import veomni_core.authoring
from models import build
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, SiteRule, bind, find_sites
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import SpecError
from veomni_ops import moe_experts
from veomni_transformers import authoring


def up_first(kernel):
    """``gate_up_proj[E, 2I, H]`` with up before gate."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        up, gate = self.gate_up_proj.chunk(2, dim=1)
        return kernel(hidden_states, top_k_index, top_k_weights, torch.cat((gate, up), dim=1), self.down_proj)

    return forward


class UpFirstExperts(authoring.ExpertsModules):
    layouts = MappingProxyType({"up first": authoring.ExpertLayout("standard", up_first)})


class Experts(nn.Module):
    """As ``Qwen3MoeExperts``, with up before gate."""

    def __init__(self, like, scale=1.0):
        super().__init__()
        self.num_experts, self.scale = like.num_experts, scale
        self.gate_up_proj = nn.Parameter(like.gate_up_proj.detach().clone())
        self.down_proj = nn.Parameter(like.down_proj.detach().clone())

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            up, gate = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            output = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert]) * self.scale
            result.index_add_(0, token, (output * top_k_weights[token, place, None]).to(result.dtype))
        return result


calls: list[int] = []


def counted(*args):
    calls.append(len(args[0]))
    return moe_experts.standard(*args)


@pytest.fixture
def registry(monkeypatch):
    module = ModuleType("acme_experts")
    module.UpFirstExperts, module.counted = UpFirstExperts, counted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_experts", module)
    spec = KernelSpec("acme", "moe_experts", "standard", "acme_experts:counted")
    rule = SiteRule("up-first experts", "acme_experts:UpFirstExperts")
    record = PluginRecord("acme", "veomni-acme", "1", "acme", kernels=(spec,), site_rules=(rule,))
    return build_registry([*definitions(), record], {})


def model_with(**options):
    model = build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts = Experts(layer.mlp.experts, **options)
    return model


def experts_sites(model, registry):
    return [site for site in find_sites(model, registry) if site.op_name == "moe_experts"]


@pytest.mark.thorough
def test_experts_in_a_layout_of_a_plugin_are_proven_and_bound(registry):
    model, own = model_with(), model_with()
    assert {site.variant for site in experts_sites(model_with(), registry)} == {"standard"}
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    calls.clear()
    config = {"preset": "eager", "moe_implementation": "acme"}
    with bind(model, config, registry=registry, verify=True) as binding:
        assert any("moe_experts" in words for words in binding.verification.sites)
        calls.clear()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert len(calls) == model.config.num_hidden_layers
    wanted = own(ids, labels=ids, use_cache=False).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_what_only_looks_so_is_not_proven(registry):
    (site, *_) = experts_sites(model_with(scale=1.01), registry)
    assert (site.variant is None and "up first" in site.evidence) or "misses by" in site.evidence


@pytest.mark.parametrize(
    ("base", "attribute", "entry"),
    [
        (authoring.ExpertsModules, "layouts", "name: ExpertLayout(variant, forward_with)"),
        (authoring.GatedMlpModules, "contracts", "variant: Contract(...)"),
        (authoring.GatedNormModules, "contracts", "variant: Contract(...)"),
        (authoring.NormModules, "contracts", "variant: Contract(...)"),
    ],
)
def test_a_rule_with_nothing_to_compare_modules_with_is_told_what_to_write(base, attribute, entry):
    rule = type("Unwritten", (base,), {attribute: {}})
    with pytest.raises(SpecError, match=rf"^Unwritten\.{attribute} is empty, .*{re.escape(entry)}"):
        rule()


def test_such_a_rule_of_a_plugin_is_skipped_and_the_others_find_their_sites(registry, monkeypatch, caplog):
    monkeypatch.setattr(UpFirstExperts, "layouts", {})
    sites = find_sites(build("qwen3_moe"), registry)
    assert {site.variant for site in sites if site.op_name == "moe_experts"} == {"standard"}
    assert "UpFirstExperts.layouts is empty" in caplog.text
    assert "VEOMNI_PLUGINS_BLOCK=acme" in caplog.text


def test_every_name_is_there_once():
    for face in (authoring, veomni_core.authoring, veomni_conformance):
        assert sorted(set(face.__all__)) == sorted(face.__all__)
        assert all(hasattr(face, name) and name in face.__doc__ for name in face.__all__)


def test_names_that_have_moved_are_there_for_one_release():
    for old, name, new in (
        ("veomni_core.authoring", "probe", "veomni_transformers.authoring"),
        ("veomni_core.authoring", "Contract", "veomni_conformance"),
        ("veomni_core.authoring", "aligned", "veomni_core.kernels"),
        ("veomni_core.kernels", "ExpertRanks", "veomni_ops.expert_ranks"),
        ("veomni_core.testing", "check_kernel", "veomni_conformance"),
        ("veomni_core.parallel.sequence", "apply_ulysses", "veomni_transformers.sequence"),
    ):
        with pytest.warns(FutureWarning, match=f"{old}.{name} is now {new}.{name}".replace(".", "[.]")):
            assert getattr(import_module(old), name) is getattr(import_module(new), name)
        with pytest.raises(AttributeError):
            getattr(import_module(old), "nothing")  # noqa: B009


def test_a_result_on_meta_is_refused_with_what_to_run_instead():
    x = torch.ones(3, device="meta")
    with pytest.raises(SpecError, match=r"on the meta device, which has no values: .* Run probe.full_copy\(module\)"):
        authoring.probe.miss(nn.Linear(3, 3, device="meta")(x), x, [x])
