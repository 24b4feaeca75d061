"""Rules that a plugin brings: used like the core's own, and answerable by name when they fail."""

from __future__ import annotations

import pytest
from torch import nn

from veomni_core import find_sites
from veomni_core.discovery import discover
from veomni_core.errors import SpecError

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


@pytest.fixture
def registry(install):
    def with_rule(find: str):
        install("veomni-acme", PLUGIN.replace("{find}", find))
        return discover({})

    return with_rule


def test_its_sites_stand_beside_the_core_s_own(registry):
    found = find_sites(nn.ReLU(), registry('return [Site("swiglu_mlp", "", rule, None, "only looked")]'))
    assert [(site.op_name, site.rule, site.evidence) for site in found] == [("swiglu_mlp", "acme rule", "only looked")]


def test_a_rule_that_fails_is_named_with_the_way_out(registry):
    rules = registry("raise KeyError('no such child')")
    message = r"site rule 'acme rule' \(veomni_acme\w*:Locator\) failed on ReLU: KeyError: .*VEOMNI_PLUGINS_BLOCK"
    with pytest.raises(SpecError, match=message):
        find_sites(nn.ReLU(), rules)


def test_a_site_of_an_unknown_op_is_refused(registry):
    with pytest.raises(SpecError, match="'acme rule' found a site of the unknown op 'softmax'"):
        find_sites(nn.ReLU(), registry('return [Site("softmax", "", rule, None, "")]'))
