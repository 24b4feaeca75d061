"""The changes that put a plan's kernels into a model, site by site."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from veomni_core.changes import Change
from veomni_core.decisions import OpDecision, SiteDecision
from veomni_core.plan import Plan
from veomni_core.registry import Registry
from veomni_core.sites.find import locator_of
from veomni_core.sites.site import SiteLocator
from veomni_core.spec import SiteRule

Kernels = Mapping[tuple[str, str, str], Callable[..., Any]]


def site_changes(
    model: nn.Module, plan: Plan, registry: Registry, kernels: Kernels
) -> Iterator[tuple[str, str, Change]]:
    """Every change that the plan asks for, with its module path and its owner, in the order of the rules.

    A change must be applied before the next one is asked for: a rule may build on what stands there.
    """
    for rule in registry.site_rules:
        locator = None  # loaded at its first site: a plugin's rule that can't be imported harms no model without one
        for op, decision in decisions_of(plan, rule):
            locator = locator or locator_of(rule)
            for change in changes_at(model, op, decision, locator, kernels):
                yield decision.site.path, f"the rule {rule.name!r} ({op.config_field})", change


def decisions_of(plan: Plan, rule: SiteRule) -> Iterator[tuple[OpDecision, SiteDecision]]:
    """What the plan decided for the sites of one rule, where that changes the model."""
    for op in plan.ops:
        for decision in op.sites:
            if decision.site.rule == rule.name and (decision.bound or (rule.installs_eager and decision.as_asked)):
                yield op, decision


def changes_at(
    model: nn.Module, op: OpDecision, decision: SiteDecision, locator: SiteLocator, kernels: Kernels
) -> Iterator[Change]:
    """The changes of one decision."""
    key = (op.op_name, decision.site.variant or "", decision.kernel)
    yield from locator.install(model, decision.site, kernels[key] if decision.bound else None)
