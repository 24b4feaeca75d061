"""The changes that put a plan's kernels into a model, site by site."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from veomni_core.binding.watched_code import WatchedCode
from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.spec import SiteRule
from veomni_core.discovery.registry import Registry
from veomni_core.planning.decisions import OpDecision, SiteDecision
from veomni_core.planning.plan import Plan
from veomni_core.sites.find import locator_of
from veomni_core.sites.site import EagerSiteLocator, SiteLocator

Kernels = Mapping[KernelSpec, Callable[..., Any]]


def site_changes(
    model: nn.Module, plan: Plan, registry: Registry, kernels: Kernels, code: WatchedCode
) -> Iterator[tuple[str, str, Change]]:
    """Every change that the plan requires, as ``(module path, owner, change)``, in the order of the site rules.

    What ``code`` watches from then on is added to it, unless it has that from the plan.

    Apply each change before taking the next one from the iterator: a rule may build on earlier changes.
    """
    for rule in registry.site_rules:
        locator = None  # imported at the rule's first site: a broken rule must not affect models without such a site
        for op, decision in decisions_of(plan, rule):
            locator = locator or locator_of(rule)
            if not code.has_sites:
                code.add_site(model, decision.site, locator)
            for change in changes_at(model, decision, locator, kernels):
                yield decision.site.path, owner_of(op, decision), change


def owner_of(op: OpDecision, decision: SiteDecision) -> str:
    """On whose behalf a site is changed, in messages: its rule, and the field that chose for it."""
    return f"the rule {decision.site.rule!r} ({op.config_field})"


def decisions_of(plan: Plan, rule: SiteRule) -> Iterator[tuple[OpDecision, SiteDecision]]:
    """The plan's decisions for the sites of one rule, without those that leave the model unchanged."""
    for op in plan.ops:
        for decision in op.sites:
            if decision.site.rule == rule.name and (decision.bound or (rule.installs_eager and decision.as_asked)):
                yield op, decision


def changes_at(model: nn.Module, decision: SiteDecision, locator: SiteLocator, kernels: Kernels) -> Iterator[Change]:
    """The changes that put the kernel of one decision, or the op's eager code, into its site."""
    if decision.spec is not None:
        yield from locator.install(model, decision.site, kernels[decision.spec], decision.spec)
    else:
        assert isinstance(locator, EagerSiteLocator)  # the rule installs eager, so locator_of has checked it
        yield from locator.install_eager(model, decision.site)
