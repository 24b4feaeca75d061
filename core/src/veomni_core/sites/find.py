"""Runs every rule over a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.bound_subclass import bindings_in
from veomni_core.discovery import discover
from veomni_core.errors import BindingError, SpecError
from veomni_core.ops.catalog import BUILTIN_SITE_RULES
from veomni_core.registry import Registry
from veomni_core.sites.claims import settle_claims
from veomni_core.sites.site import Site, SiteLocator
from veomni_core.spec import SiteRule, load_attribute


def find_sites(model: nn.Module, registry: Registry | None = None) -> tuple[Site, ...]:
    """Every site in ``model`` (on any device, ``meta`` too), sorted by op and path.

    The model is read, never changed, and its weights are never computed on: proofs run on tiny copies on the CPU.

    Raises:
        BindingError: ``model`` is not a module, or is bound.
        SpecError: a rule failed, or names an op that is not registered; the message names the rule.
    """
    if not isinstance(model, nn.Module):
        raise BindingError(f"find_sites needs a torch.nn.Module, not a {type(model).__name__}")
    if any(any(bindings_in(module)) for module in model.modules()):
        raise BindingError(
            "find_sites reads a model's own code, and this model is bound: binding_of(model).plan has its sites, and "
            "binding_of(model).undo() gives its own code back"
        )
    registry = registry or discover()
    sites = [site for rule in registry.site_rules for site in _sites_of(rule, model, registry)]
    return settle_claims(sorted(sites, key=lambda site: (site.op_name, site.rule, _natural(site.path))))


def _sites_of(rule: SiteRule, model: nn.Module, registry: Registry) -> tuple[Site, ...]:
    try:
        sites = tuple(locator_of(rule).find(model, rule.name))
    except Exception as error:
        raise SpecError(
            f"site rule {rule.name!r} ({rule.locator}) failed on {type(model).__name__}: {type(error).__name__}: "
            f"{error}. If a plugin brings it, VEOMNI_PLUGINS_BLOCK=<the plugin> leaves it out"
        ) from error
    for site in sites:
        if site.op_name not in registry.ops:
            raise SpecError(f"site rule {rule.name!r} found a site of the unknown op {site.op_name!r}")
    if rule in BUILTIN_SITE_RULES:
        return sites
    # Only the core's own rules are known to prove; a plugin's may, but nothing here can tell.
    return tuple(replace(site, declared=True) for site in sites)


def locator_of(rule: SiteRule) -> SiteLocator:
    """The object that finds and fills the sites of ``rule``."""
    return load_attribute(rule.locator)()  # type: ignore[no-any-return]


def _natural(path: str) -> tuple[Any, ...]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split("."))
