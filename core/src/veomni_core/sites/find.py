"""Runs every rule over a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from veomni_core.discovery import discover
from veomni_core.errors import BindingError, SpecError
from veomni_core.registry import Registry
from veomni_core.sites.sharding import ModelSharding
from veomni_core.sites.site import Site, SiteLocator
from veomni_core.spec import SiteRule, load_attribute


def find_sites(model: nn.Module, registry: Registry | None = None) -> tuple[Site, ...]:
    """Every site in ``model`` (on any device, ``meta`` too), sorted by op and path.

    The model is read, never changed, and its weights are never computed on: proofs run on tiny copies on the CPU.
    Where parameters are sharded in a way that kernels can't be bound on, sites have no variant, and say so. In a model
    that FSDP1 has flattened no rule that reads parameters is run: each op then has one site, at the path of what was
    flattened.

    Raises:
        BindingError: ``model`` is not a module.
        SpecError: a rule failed, or names an op that is not registered; the message names the rule.
    """
    if not isinstance(model, nn.Module):
        raise BindingError(f"find_sites needs a torch.nn.Module, not a {type(model).__name__}")
    registry = registry or discover()
    sharding = ModelSharding(model)
    rules = [rule for rule in registry.site_rules if sharding.flattened is None or not rule.reads_parameters]
    sites = [_where_sharded(site, sharding) for rule in rules for site in _sites_of(rule, model, registry)]
    if sharding.flattened is not None:
        sites += _not_looked_for({*registry.ops} - {site.op_name for site in sites}, sharding)
    return tuple(sorted(sites, key=lambda site: (site.op_name, site.rule, _natural(site.path))))


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
    return sites


def _where_sharded(site: Site, sharding: ModelSharding) -> Site:
    why_not = sharding.of(site.path).why_not
    return replace(site, variant=None, evidence=why_not) if why_not else site


def _not_looked_for(op_names: Iterable[str], sharding: ModelSharding) -> list[Site]:
    path = sharding.flattened or ""
    return [Site(name, path, "flattened", None, sharding.of(path).why_not, examined=False) for name in op_names]


def locator_of(rule: SiteRule) -> SiteLocator:
    """The object that finds and fills the sites of ``rule``."""
    return load_attribute(rule.locator)()  # type: ignore[no-any-return]


def _natural(path: str) -> tuple[Any, ...]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split("."))
