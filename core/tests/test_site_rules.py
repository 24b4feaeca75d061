"""Rules that a plugin brings: used like the core's own, and answerable by name when they fail."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm as RMSNorm

from veomni_core import Plan, bind, find_sites, make_plan
from veomni_core.discovery import discover
from veomni_core.errors import NoSiteError, SpecError
from veomni_core.sites.norms import NormModules

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
        return x

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
    "finds something else": ("return ['norm']", "it found 'norm' (str), which is no Site"),
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
    assert failure.endswith("veomni-acme 1.0 brings it, and VEOMNI_PLUGINS_BLOCK=veomni-acme leaves it out")
    assert failure in caplog.text
    assert "left out: site rule 'acme rule'" in binding.plan.table()
    assert Plan.from_json(binding.plan.to_json()) == binding.plan


def test_a_choice_that_needs_a_rule_that_failed_is_refused_with_its_reason(registry):
    rules = registry("raise KeyError('no such child')")
    ask = {"preset": "eager", "swiglu_mlp_implementation": {"*.special": "torch"}}
    message = r"(?s)no swiglu_mlp site.*site rule 'acme rule' .* failed on ReLU: KeyError: 'no such child'.*acme"
    with pytest.raises(NoSiteError, match=message):
        make_plan(nn.ReLU(), ask, registry=rules, hardware="cpu")


def test_a_rule_of_the_core_that_fails_raises(registry, monkeypatch):
    def fail(self, model, rule):
        raise KeyError("no such child")

    monkeypatch.setattr(NormModules, "find", fail)
    with pytest.raises(SpecError, match=r"site rule 'norm modules' .* failed on ReLU: KeyError: 'no such child'"):
        find_sites(nn.ReLU(), registry("return []"))
