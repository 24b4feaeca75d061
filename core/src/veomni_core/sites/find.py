"""Runs every rule over a model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from veomni_core.changes.bound_subclass import bindings_in
from veomni_core.descriptions.references import load_attribute, raise_interrupt
from veomni_core.descriptions.spec import SiteRule
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError, SpecError, did_you_mean
from veomni_core.sites.model_view import ModelView, view_of
from veomni_core.sites.site import EagerSiteLocator, Site, SiteLocator
from veomni_core.sites.walk import named_modules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchResult:
    """What was found in a model.

    Attributes:
        sites: the sites, sorted by op and path.
        failed_rules: one sentence for each plugin's rule that failed on the model and was skipped.
        description: of the model by content (:meth:`veomni_core.sites.model_view.ModelView.description`).
        locators: what found the sites, by the rule's name.
    """

    sites: tuple[Site, ...]
    failed_rules: tuple[str, ...] = ()
    description: Any = None
    locators: Mapping[str, SiteLocator] = field(default_factory=dict)


def find_sites(model: nn.Module, registry: Registry | None = None) -> tuple[Site, ...]:
    """Every site in ``model`` (on any device, ``meta`` too), sorted by op and path.

    The model is read, never changed, and its weights are never computed on: proofs run on tiny copies on the CPU. A
    plugin's rule that fails is skipped, with a logged warning that names it. A model that transformers' distributed
    engine has sharded is proven as the whole model that it is a part of, and each site says over how many ranks its
    parameters are divided. Sites whose parameters are sharded in a way that ``bind`` does not support have no variant,
    and their evidence says why. In a model whose parameters FSDP1
    has flattened, rules that read parameters are not run: each op that no other rule finds has one site without a
    variant, at the path of the flattened module.

    Args:
        model: any ``torch.nn.Module`` that is not bound, on any device.
        registry: the plugins whose rules run; discovered without it.

    Returns:
        The sites, sorted by op and path.

    Raises:
        BindingError: ``model`` is not a module, or is bound; or no plugin has a rule.
        SpecError: a rule of a plugin that defines what ops are (:class:`veomni_core.PluginRecord`) failed; the message
            names it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> sites = find_sites(LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)))
        >>> for site in sites:
        ...     if site.op_name in ("rms_norm", "swiglu_mlp"):
        ...         print(f"{site.op_name}/{site.variant}", site.path, dict(site.sizes))
        rms_norm/standard model.layers.0.input_layernorm {'width': (32,)}
        rms_norm/standard model.layers.0.post_attention_layernorm {'width': (32,)}
        rms_norm/standard model.layers.1.input_layernorm {'width': (32,)}
        rms_norm/standard model.layers.1.post_attention_layernorm {'width': (32,)}
        rms_norm/standard model.norm {'width': (32,)}
        swiglu_mlp/standard model.layers.0.mlp {'hidden': (32,), 'intermediate': (48,)}
        swiglu_mlp/standard model.layers.1.mlp {'hidden': (32,), 'intermediate': (48,)}
    """
    return search(model, registry).sites


def search(model: nn.Module, registry: Registry | None = None, distributed_config: Any = None) -> SearchResult:
    """As :func:`find_sites`, together with the plugins' rules that failed.

    With ``distributed_config``, the sites are those of a whole ``model`` once it is divided so.

    Raises:
        ConfigError: ``model`` can't be divided as ``distributed_config`` says.
    """
    if not isinstance(model, nn.Module):
        raise BindingError(f"find_sites needs a torch.nn.Module, not a {type(model).__name__}")
    if any(any(bindings_in(module)) for _, module in named_modules(model)):
        raise BindingError(
            "find_sites reads a model's own code, and this model is bound: binding_of(model).plan has its sites. To "
            "search it again, call binding_of(model).undo() first"
        )
    registry = registry or discover()
    if not registry.site_rules:
        raise BindingError(
            f"no installed plugin finds ops in models, so nothing in a {type(model).__name__} could be bound: "
            "pip install veomni-transformers"
        )
    view = view_of(model, registry, distributed_config)
    sites: list[Site] = []
    failed: list[str] = []
    rules = [rule for rule in registry.site_rules if view.reads(rule)]
    locators = _locators(rules)
    view.start(locators)
    for rule in rules:
        try:
            locator = locators.get(rule) or locator_of(rule)  # a locator that can't be made raises here
            found, unknown = _sites_of(rule, locator, view, registry)
            failed += unknown
            sites += found
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise_interrupt(error)
            plugin = registry.plugin_of_rule(rule)
            failure = f"site rule {rule.name!r} ({rule.locator}) failed on {type(model).__name__}: "
            failure += str(error) if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
            if plugin is None or plugin.defines:
                raise SpecError(failure) from error
            failure += f". {plugin} brings this rule; set VEOMNI_PLUGINS_BLOCK={plugin.name} to leave it out"
            failed.append(failure)
            logger.warning("no site of this rule is bound: %s", failure, exc_info=error)
    view.finish()
    sites += view.not_found({*registry.ops} - {site.op_name for site in sites})
    ordered = sorted(sites, key=lambda site: (site.op_name, site.rule, _natural(site.path)))
    by_name = {rule.name: locator for rule, locator in locators.items()}
    return SearchResult(_settle_claims(ordered), tuple(failed), view.description(), by_name)


def _locators(rules: Iterable[SiteRule]) -> dict[SiteRule, SiteLocator]:
    """The locators that can be made."""
    locators = {}
    for rule in rules:
        try:
            locators[rule] = locator_of(rule)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise_interrupt(error)
    return locators


def _sites_of(
    rule: SiteRule, locator: SiteLocator, view: ModelView, registry: Registry
) -> tuple[list[Site], list[str]]:
    """The sites that the rule found, and a sentence for each op that the model declares and no plugin defines."""
    unknown: dict[str, list[str]] = {}  # modeling code, and not the rule, names an op that no plugin defines
    found = []
    for site in view.found(rule, lambda: locator.find(view.model, rule.name)):
        if isinstance(site, Site) and site.declared and site.op_name not in registry.ops:
            unknown.setdefault(site.op_name, []).append(site.path or "the model")
        else:
            found.append(site)
    placed = [view.placed(_checked(site, rule, registry)) for site in found]
    divided = [_checked(site, rule, registry) for site in view.divided(rule)]
    return [*placed, *divided], list(_said_of(unknown, registry))


def _said_of(unknown: Mapping[str, list[str]], registry: Registry) -> Iterator[str]:
    for op_name, at in unknown.items():
        more = f" and {len(at) - 1} more" if len(at) > 1 else ""
        sentence = (
            f"{at[0]}{more}: its code declares the op {op_name!r}, which no installed plugin defines, so it runs its "
            f"own code. {did_you_mean(op_name, registry.ops)}"
        )
        logger.warning(sentence)
        yield sentence


def _checked(site: Any, rule: SiteRule, registry: Registry) -> Site:
    """``site`` with its variant's own name, and declared if a plugin's rule found it.

    Raises:
        SpecError: it is no site, or of no known op.
    """
    if not isinstance(site, Site):
        raise SpecError(f"it found {site!r} ({type(site).__name__}), which is not a Site")
    if site.op_name not in registry.ops:
        raise SpecError(f"it found a site of the unknown op {site.op_name!r}")
    declared = site.declared or not rule.proves
    variant = registry.canonical_variant(site.op_name, site.variant)
    same = variant == site.variant and declared == site.declared
    return site if same else replace(site, variant=variant, declared=declared)


def locator_of(rule: SiteRule) -> SiteLocator:
    """The object that finds the sites of ``rule`` and installs kernels there.

    Raises:
        SpecError: the rule says ``installs_eager``, and its locator has no ``install_eager``.
    """
    locator: SiteLocator = load_attribute(rule.locator)()
    if rule.installs_eager and not isinstance(locator, EagerSiteLocator):
        raise SpecError(
            f"SiteRule {rule.name!r} says installs_eager=True, and its locator {rule.locator} has no method "
            "install_eager(self, model, site). Write one that yields the changes by which the op's eager code runs at "
            "the site; install always gets a kernel"
        )
    return locator


def _natural(path: str) -> tuple[Any, ...]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split("."))


def _settle_claims(sites: Iterable[Site]) -> tuple[Site, ...]:
    """``sites``, in which at most one rule per op and module keeps its variant; the other sites get ``variant=None``.

    A proven site takes precedence over declared ones. If several rules have proven the module, or none has, no rule
    gets it: the model's own code runs there, and the evidence names the rules. A rule that looked at a module and could
    not prove it says nothing where another rule claims it.
    """
    sites = tuple(sites)
    claims: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        if site.variant is not None:
            claims.setdefault((site.op_name, site.path), []).append(site)
    claimed = [(site, claims.get((site.op_name, site.path), [])) for site in sites]
    return tuple(_settled(site, rivals) for site, rivals in claimed if site.variant is not None or not rivals)


def _settled(site: Site, claims: list[Site]) -> Site:
    rules = {claim.rule for claim in claims}
    if site.variant is None or len(rules) < 2:
        return site
    proven = {claim.rule for claim in claims if not claim.declared}
    if proven == {site.rule}:
        return site
    if len(proven) == 1:
        why = f"the rule {proven.pop()!r} has proven this module, so it takes precedence"
        return replace(site, variant=None, evidence=why)
    named = " and ".join(repr(rule) for rule in sorted(rules))
    return replace(site, variant=None, evidence=f"the rules {named} both claim this module; leave one of them out")
