"""How rules read a model of transformers: whole where the engine or FSDP2 has sharded it, with a memory of proofs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from veomni_core.descriptions.sharding import WHOLE, Sharding
from veomni_core.descriptions.spec import SiteRule
from veomni_core.sites.model_view import ModelView
from veomni_core.sites.site import Site, SiteLocator
from veomni_transformers.engine.engine_layout import DividedSiteLocator, EngineLayout, ShardedSiteLocator
from veomni_transformers.engine.layout import layout_for, layout_of
from veomni_transformers.engine.sharding import ModelSharding
from veomni_transformers.engine.whole_twin import whole_twin
from veomni_transformers.memory.proof_memory import Recollection, described
from veomni_transformers.proving.proof import Proof

logger = logging.getLogger(__name__)


class TransformersView(ModelView):
    """A model that transformers' distributed engine has sharded is read as the whole model that it is a part of.

    Args:
        model: the model that is searched.
        distributed_config: how the engine will shard ``model``, which is whole; ``None`` for a model as it is.

    Raises:
        ConfigError: ``model`` can't be sharded as ``distributed_config`` says.
        HostError: this version of transformers has no distributed engine.
    """

    def __init__(self, model: nn.Module, distributed_config: Any = None) -> None:
        super().__init__(model)
        self.layout: EngineLayout | None = None
        self._locators: Mapping[str, SiteLocator] = {}
        if distributed_config is not None:
            self.layout = layout_for(model, distributed_config)
        elif (layout := layout_of(model)) is not None:
            self.model, self.layout = whole_twin(model), layout
        self._memory: Recollection | None = None

    @cached_property
    def _sharding(self) -> ModelSharding:
        return ModelSharding(self.model)

    def start(self, locators: Mapping[SiteRule, SiteLocator]) -> None:
        self._memory = Recollection(self.model, locators)
        self._locators = {rule.name: locator for rule, locator in locators.items()}

    def description(self) -> Any:
        # FSDP 1's parameters are views of memory that it frees: a look at one ends the process.
        if self.layout is not None or self._sharding.flattened is not None:
            return None
        if self._memory is not None and self._memory.described is not None:
            return self._memory.described
        try:
            return described(self.model)
        except Exception as error:  # code of others runs while it looks
            logger.debug("a plan for it is compared by a search: %s: %s", type(error).__name__, error)
            return None

    def reads(self, rule: SiteRule) -> bool:
        return self._sharding.flattened is None or not rule.reads_parameters

    def found(self, rule: SiteRule, find: Callable[[], Iterable[Site]]) -> Iterable[Site]:
        return self._memory.sites(rule, find) if self._memory else find()

    def placed(self, site: Site) -> Site:
        if self.layout is not None:
            return _under(site, self.layout, self._locators.get(site.rule))
        found = self._sharding.of(site.path)
        divided = Sharding(fsdp=found.ranks) if found.ranks > 1 else WHOLE
        if found.why_not:
            return replace(site, sharding=divided, variant=None, evidence=found.why_not)
        return site if site.sharding == divided else replace(site, sharding=divided)

    def divided(self, rule: SiteRule) -> Iterable[Site]:
        locator = self._locators.get(rule.name)
        if self.layout is not None and isinstance(locator, DividedSiteLocator):
            return locator.find_divided(self.model, self.layout, rule.name)
        return ()

    def not_found(self, op_names: Collection[str]) -> Iterable[Site]:
        if (path := self._sharding.flattened) is None:
            return ()
        proof = Proof(None, self._sharding.of(path).why_not, examined=False)
        return [proof.site(name, path, "flattened") for name in op_names]

    def finish(self) -> None:
        if self._memory is not None:
            self._memory.keep()


def _under(site: Site, layout: EngineLayout, locator: SiteLocator | None) -> Site:
    """What ``site``, found on the whole model, is under ``layout``."""
    site = replace(site, sharding=layout.of(site.path))
    if site.variant is None or not site.sharding.divides_forward:
        return site
    if isinstance(locator, ShardedSiteLocator):
        return locator.sharded(site, layout)
    why_not = f"its parameters are divided ({site.sharding}), and the rule {site.rule!r} has no method sharded"
    return replace(site, variant=None, evidence=why_not, examined=False)
