"""How rules read a model: as it is, or through what a distribution knows of models that are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from veomni_core.descriptions.spec import SiteRule
from veomni_core.discovery.registry import Registry, load_rule
from veomni_core.errors import ConfigError
from veomni_core.sites.site import Site, SiteLocator


class ModelView:
    """One search of one model. This class reads it as it is: whole, on one rank, and each time anew.

    Args:
        model: the model that is searched.

    Attributes:
        model: what the rules read; for a divided model, the whole that it is a part of.

    Example:
        >>> from dataclasses import replace
        >>> class FirstStage(ModelView):  # of a pipeline: this rank has the layers before the fourth
        ...     def placed(self, site):
        ...         there = site.path.startswith("layers.3")
        ...         return replace(site, variant=None, evidence="it is another rank's") if there else site
        >>> site = Site("rms_norm", "layers.3.norm", "norms", "standard", "compared", dtype="bfloat16")
        >>> FirstStage(nn.Identity()).placed(site).evidence
        "it is another rank's"
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def start(self, locators: Mapping[SiteRule, SiteLocator]) -> None:
        """Called before the search, with the locators that could be made."""

    def reads(self, rule: SiteRule) -> bool:
        """Whether ``rule`` can run on this model."""
        return True

    def found(self, rule: SiteRule, find: Callable[[], Iterable[Site]]) -> Iterable[Site]:
        """The sites of ``rule``: what ``find`` gives, or what is known of such a model already."""
        return find()

    def placed(self, site: Site) -> Site:
        """``site`` with how its parameters are divided, and without a variant where no kernel can run so."""
        return site

    def divided(self, rule: SiteRule) -> Iterable[Site]:
        """Sites of ``rule`` that come from how the model is divided: the whole that it is a part of has none there."""
        return ()

    def not_found(self, op_names: Collection[str]) -> Iterable[Site]:
        """Sites without a variant that say why ops outside of ``op_names`` were not looked for."""
        return ()

    def description(self) -> Any:
        """All that rules read of the model, to be compared with that of another; ``None`` where it can't be said."""
        return None

    def finish(self) -> None:
        """Called after the search, when all rules have run."""


def view_of(model: nn.Module, registry: Registry, distributed_config: Any = None) -> ModelView:
    """The view of the first plugin that knows models like ``model``; a plain :class:`ModelView` without one.

    Raises:
        ConfigError: ``distributed_config`` is given, and no plugin knows how it divides ``model``; or the plugin
            refuses it.
    """
    for spec in registry.model_views:
        make = load_rule(registry, spec, spec.view)
        view: ModelView | None = make(model, distributed_config) if make else None
        if view is not None:
            return view
    if distributed_config is not None:
        raise ConfigError(
            f"distributed_config: no installed plugin knows how a {type(model).__name__} is divided over ranks. "
            "pip install veomni-transformers"
        )
    return ModelView(model)
