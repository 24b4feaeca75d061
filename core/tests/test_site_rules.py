"""Rules that a plugin brings: used like the core's own, and answerable by name when they fail."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm as RMSNorm

from counting_kernels import calls
from models import build
from plugin_rules import (
    CallingLayers,
    EagerNorms,
    HoldingNorms,
    Layers,
    MlpsAsNorms,
    ReadingLayers,
    SameNorms,
    WrongNorms,
    registry_with,
)
from veomni_core import Plan, bind, find_sites, make_plan
from veomni_core.discovery.discover import discover
from veomni_core.errors import BindingError, ConformanceError, KernelUnavailableError, NoSiteError, SpecError
from veomni_transformers.norms.rms_norm_gated import GatedNormModules

PLUGIN = """
    from veomni_core import SiteRule, hookimpl
    from veomni_core.sites.site import Site

    VEOMNI_PLUGIN_API_VERSION = 1

    class Locator:
        def find(self, model, rule):
            {find}

    @hookimpl
    def veomni_sites():
        return [SiteRule("acme rule", "{module}:Locator")]
"""
KERNEL = """
    from veomni_core import KernelSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def kernel(x, weight, eps):
        return x * weight

    @hookimpl
    def veomni_kernels():
        return [KernelSpec("mine", "rms_norm", "standard", "{module}:kernel")]
"""


@pytest.fixture
def registry(install):
    def with_rule(find: str):
        install("veomni-acme", PLUGIN.replace("{find}", find))
        return discover({})

    return with_rule


def test_its_sites_stand_beside_the_core_s_own(registry):
    found = find_sites(nn.ReLU(), registry('return [Site("swiglu_mlp", "", rule, None, "only looked")]'))
    assert [(site.op_name, site.rule, site.evidence) for site in found] == [("swiglu_mlp", "acme rule", "only looked")]


FAILURES = {
    "raises": ("raise KeyError('no such child')", "KeyError: 'no such child'"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "finds a site of an unknown op": (
        'return [Site("softmax", "", rule, None, "")]',
        "it found a site of the unknown op 'softmax'",
    ),
    "finds something else": ("return ['norm']", "it found 'norm' (str), which is not a Site"),
    "is not there": (None, "AttributeError: "),
}


@pytest.mark.parametrize("find, problem", FAILURES.values(), ids=FAILURES)
def test_a_plugin_s_rule_that_fails_is_left_out_and_every_model_is_bound_without_it(install, caplog, find, problem):
    source = PLUGIN.replace("{find}", find or "pass")
    install("veomni-acme", source if find else source.replace(":Locator", ":Nowhere"))
    install("veomni-kernels", KERNEL)
    registry = discover({})
    model = nn.Sequential(RMSNorm(8))
    binding = bind(model, {"preset": "eager", "rms_norm_implementation": "mine"}, registry=registry)
    assert [op.chosen for op in binding.plan.ops if op.sites] == [("mine",)]
    (failure,) = binding.plan.failed_rules
    assert failure.startswith("site rule 'acme rule' (veomni_acme")
    assert f"failed on Sequential: {problem}" in failure
    assert failure.endswith("veomni-acme 1.0 brings this rule; set VEOMNI_PLUGINS_BLOCK=veomni-acme to leave it out")
    assert failure in caplog.text
    assert "left out: site rule 'acme rule'" in binding.plan.table()
    assert Plan.from_json(binding.plan.to_json()) == binding.plan


def test_a_locator_whose_install_selects_eager_code_is_told_to_have_install_eager(install):
    source = PLUGIN.replace("{find}", "return []").replace(':Locator"', ':Locator", installs_eager=True')
    source = source.replace(
        "    @hookimpl", "        def install(self, model, site, kernel, spec):\n            return []\n\n    @hookimpl"
    )
    install("veomni-acme", source)
    plan = make_plan(nn.ReLU(), {"preset": "eager"}, registry=discover({}), hardware="cpu")
    (failure,) = plan.failed_rules
    assert "says installs_eager=True, and its locator veomni_acme" in failure
    assert "has no method install_eager(self, model, site). Write one that yields the changes" in failure


def test_eager_code_is_installed_by_a_method_of_its_own():
    registry = registry_with(EagerNorms)
    registry = replace(
        registry,
        site_rules=tuple(replace(r, installs_eager=r.locator.endswith(":EagerNorms")) for r in registry.site_rules),
    )
    model = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8)))
    bind(model, ask(rms_norm_implementation="eager"), registry=registry)
    assert model.norm(torch.ones(1, 8)) == "eager code"


def test_a_choice_that_needs_a_rule_that_failed_is_refused_with_its_reason(registry):
    rules = registry("raise KeyError('no such child')")
    ask = {"preset": "eager", "swiglu_mlp_implementation": {"*.special": "torch"}}
    message = r"(?s)no swiglu_mlp site.*site rule 'acme rule' .* failed on ReLU: KeyError: 'no such child'.*acme"
    with pytest.raises(NoSiteError, match=message):
        make_plan(nn.ReLU(), ask, registry=rules, hardware="cpu")


def test_a_rule_of_the_core_that_fails_raises(registry, monkeypatch):
    def fail(self, model, rule):
        raise KeyError("no such child")

    monkeypatch.setattr(GatedNormModules, "find", fail)  # no other rule's class is based on it
    with pytest.raises(SpecError, match=r"site rule 'gated norm modules' .* failed on ReLU: KeyError: 'no such child'"):
        find_sites(nn.ReLU(), registry("return []"))


def ask(**fields: str) -> dict[str, str]:
    return {"preset": "eager", "attn_implementation": "eager", **fields}


def test_a_plugin_s_sites_are_declared_and_the_core_s_are_proven():
    sites = find_sites(build("llama"), registry_with(Layers))
    assert {site.declared for site in sites if site.rule == "Layers"} == {True}
    assert {site.declared for site in sites if site.rule == "norm modules"} == {False}


def test_a_proven_site_goes_before_a_declared_one_of_the_same_module():
    model = build("llama")
    binding = bind(model, ask(rms_norm_implementation="one"), registry=registry_with(SameNorms))
    model.model.norm(torch.ones(1, 32))
    assert calls == {("rms_norm", "standard", "one"): 1}
    (op,) = [op for op in binding.receipt.to_dict()["ops"] if op["op"] == "rms_norm"]
    assert (op["bound"], op["declared"]) == (5, 0)
    assert {each["reason"] for each in op["eager"]} == {
        "not proven: the rule 'norm modules' has proven this module, so it takes precedence"
    }


def test_two_declared_claims_of_one_module_are_refused_with_both_named():
    registry = registry_with(SameNorms, HoldingNorms)
    model = build("gemma3_text", hidden_size=32)
    model.norm = nn.Linear(2, 2)  # no rule of the core has it
    with pytest.raises(KernelUnavailableError, match="the rules 'HoldingNorms' and 'SameNorms' both claim this module"):
        bind(model, ask(rms_norm_implementation={"norm": "one", "default": "eager"}), registry=registry)


@pytest.mark.parametrize("order", [5, 50])
def test_two_rules_that_replace_one_forward_are_refused_with_both_named(order):
    model, config = build("llama"), ask(rms_norm_implementation="one", swiglu_mlp_implementation="one")
    first, second = ("MlpsAsNorms", "gated MLP modules") if order == 5 else ("gated MLP modules", "MlpsAsNorms")
    message = rf"model.layers.0.mlp: the rule '{first}' .* and the rule '{second}' .* both replace its forward"
    with pytest.raises(BindingError, match=message):
        bind(model, config, registry=registry_with(MlpsAsNorms, order=order))
    assert all(
        type(module) is type(other) for module, other in zip(model.modules(), build("llama").modules(), strict=True)
    )


@pytest.mark.parametrize("order", [5, 50])
def test_a_forward_that_hides_what_is_bound_in_a_child_is_refused_with_both_named(order):
    config = ask(rms_norm_implementation="one", swiglu_mlp_implementation={"*.layers.0": "one", "default": "eager"})
    message = (
        r"the rule 'Layers' \(swiglu_mlp_implementation\) replaces the forward of model.layers.0, and what the rule "
        r"'norm modules' \(rms_norm_implementation\) put into model.layers.0.input_layernorm would never run"
    )
    with pytest.raises(BindingError, match=message):
        bind(build("llama"), config, registry=registry_with(Layers, order=order))
    bind(build("llama"), config, registry=registry_with(CallingLayers, order=order))


def test_a_norm_whose_weight_alone_is_read_is_not_bound_in_the_receipt():
    config = ask(rms_norm_implementation="one", swiglu_mlp_implementation={"*.layers.0": "one", "default": "eager"})
    receipt = bind(build("llama"), config, registry=registry_with(ReadingLayers)).receipt
    why = "never called: the rule 'ReadingLayers' (swiglu_mlp_implementation) replaces the forward around it"
    assert receipt.not_called == {"model.layers.0.input_layernorm": f"{why}, which only reads it"}
    (op,) = [op for op in receipt.to_dict()["ops"] if op["op"] == "rms_norm"]
    assert (op["bound"], op["found"]) == (4, 5)
    assert "never called" in str(receipt)


def test_a_forward_that_closes_over_its_module_is_refused_with_the_rule_named():
    model = build("gemma3_text")
    model.norm = nn.LayerNorm(32)
    with pytest.raises(SpecError, match="the rule 'HoldingNorms' .* to a LayerNorm holds a module"):
        bind(
            model,
            ask(rms_norm_implementation={"norm": "one", "default": "eager"}),
            registry=registry_with(HoldingNorms),
        )


class Own(nn.Module):
    """A norm that the core's rules don't take for one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, hidden_states):
        return self.weight * hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("rule, right", [(SameNorms, True), (WrongNorms, False)])
def test_verify_compares_a_plugin_s_site_with_the_module_s_own_code(rule, right):
    model = build("llama")
    model.model.norm = Own()
    for layer in model.model.layers:
        layer.input_layernorm = Own()
    asked = ask(rms_norm_implementation={"model.norm" if right else "*.input_layernorm": "one", "default": "eager"})
    if right:
        binding = bind(model, asked, registry=registry_with(rule), verify=True)
        assert "rms_norm/standard:one at 1 sites" in binding.receipt.to_dict()["verified_sites"]
        return
    message = (
        r"rms_norm/standard:one at model.layers.0.input_layernorm, found by the rule 'WrongNorms', is not what the "
        r"module's own code computes here: the result is off: element error"
    )
    with pytest.raises(ConformanceError, match=message):
        bind(model, asked, registry=registry_with(rule), verify=True)
    assert type(model.model.norm) is Own
    bind(model, asked, registry=registry_with(rule))
