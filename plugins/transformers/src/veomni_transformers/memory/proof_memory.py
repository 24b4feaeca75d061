"""What rules found in a model, kept in this process for the next model that can't be told apart from it.

The sites of a rule are kept under the description of the model (:mod:`veomni_transformers.memory.model_description`),
and for as long as the code that the model and the rules can reach is as it was
(:mod:`veomni_transformers.memory.code_snapshot`). Whatever can't be described is proven as if there were no memory.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from veomni_core.descriptions.spec import SiteRule
from veomni_core.sites.site import Site, SiteLocator
from veomni_core.sites.walk import named_modules
from veomni_transformers.memory.code_snapshot import CodeSnapshot
from veomni_transformers.memory.model_description import Description, Indescribable

logger = logging.getLogger(__name__)
# A model of fewer modules is proven anew: proofs take 0.3 to 0.5 s of CPU time, and reading the namespaces takes 0.2 to
# 2 s, by how much the process has imported. A Llama of 16 layers has 215 modules, a Qwen3-MoE of 48 layers 679.
FEWEST_MODULES = 200
_MOST_MODELS = 8  # a description and a snapshot take some megabytes
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})
Sites = tuple[Site, ...]


@dataclass(frozen=True)
class _Entry:
    """The sites that each rule found, the classes and code in the description, and what stood in namespaces then."""

    sites: Mapping[SiteRule, Sites]
    named: tuple[ref[Any], ...]
    snapshot: CodeSnapshot

    def counts(self) -> bool:
        return all(each() is not None for each in self.named) and self.snapshot.holds()


_remembered_sites: OrderedDict[Hashable, _Entry] = OrderedDict()
_lock = threading.Lock()


def forget_proofs() -> None:
    """Drop all that is remembered, so that the next search proves every site anew.

    Call it after a change that neither a model nor a namespace shows: in a file that a rule reads, or in C.

    Example:
        >>> forget_proofs()
    """
    with _lock:
        _remembered_sites.clear()


def described(model: nn.Module) -> tuple[Hashable, Description]:
    """``model`` by content, with what of the process's settings reaches into proofs.

    Raises:
        Indescribable: it can't be compared by content, or a mode is active that sees each call of torch.
    """
    return _settings(), Description(model)


class Recollection:
    """What is remembered of one model, and what its search finds anew.

    Args:
        model: the model that is searched. Of one with fewer than :data:`FEWEST_MODULES` modules nothing is remembered.
        locators: of each rule that may run. A rule whose locator has state that can't be described is not remembered.

    Attributes:
        described: the model, if it was described (:func:`described`).

    Example:
        >>> from veomni_transformers.norms.rms_norm import NormModules
        >>> rule = SiteRule("norms", "veomni_transformers.norms.rms_norm:NormModules")
        >>> def search(eps):
        ...     model, locator, runs = nn.Sequential(*(nn.RMSNorm(8, eps) for _ in range(200))), NormModules(), []
        ...     recollection = Recollection(model, {rule: locator})
        ...     sites = recollection.sites(rule, lambda: runs.append(rule) or locator.find(model, "norms"))
        ...     recollection.keep()
        ...     return [*sites][0].detail["eps"], len(runs)
        >>> [search(eps) for eps in (1e-6, 1e-6, 1e-5)]
        [(1e-06, 1), (1e-06, 0), (1e-05, 1)]
    """

    def __init__(self, model: nn.Module, locators: Mapping[SiteRule, SiteLocator]) -> None:
        self._known: dict[SiteRule, Sites] = {}
        self._found: dict[SiteRule, Sites] = {}
        self._snapshot: CodeSnapshot | None = None
        self.described: tuple[Hashable, Description] | None = None
        self._loaded = len(sys.modules)
        if len(named_modules(model)) < FEWEST_MODULES:
            return
        try:
            self._describe(model, locators)
        except Exception as error:  # a memory is no condition: code of others runs while it looks
            logger.debug("%s is proven without memory: %s: %s", type(model).__name__, type(error).__name__, error)
            self._snapshot = None

    def sites(self, rule: SiteRule, find: Callable[[], Iterable[Site]]) -> Iterable[Site]:
        """The sites that ``rule`` found in such a model, or what ``find`` gives, which is run if none are known."""
        if rule in self._known:
            return _copied(self._known[rule])
        found = tuple(find())
        if self._snapshot is not None and rule in self._describable:
            try:
                self._found[rule] = _copied(found)
            except Indescribable as error:
                logger.debug("the sites of %s are not remembered: %s", rule.name, error)
        return found

    def keep(self) -> None:
        """Remember what was found, if no code was changed meanwhile."""
        if self._snapshot is None or not self._found:
            return
        try:
            if not self._snapshot.holds():
                return
            if len(sys.modules) != self._loaded:  # proofs import: what they imported counts too
                self._snapshot = CodeSnapshot(self._roots)
        except Exception as error:
            logger.debug("what was found is not remembered: %s: %s", type(error).__name__, error)
            return
        entry = _Entry({**self._known, **self._found}, self._named, self._snapshot)
        with _lock:
            _remembered_sites[self._key] = entry
            _remembered_sites.move_to_end(self._key)
            while len(_remembered_sites) > _MOST_MODELS:
                _remembered_sites.popitem(last=False)

    def _describe(self, model: nn.Module, locators: Mapping[SiteRule, SiteLocator]) -> None:
        settings, model_part = self.described = described(model)
        parts = {rule: part for rule, locator in locators.items() if (part := _description_of(locator)) is not None}
        self._describable = frozenset(parts)
        self._key = (settings, model_part.key, tuple((rule, part.key) for rule, part in parts.items()))
        everything = (model_part, *parts.values())
        self._named = tuple(dict.fromkeys(each for part in everything for each in part.named))
        self._roots = list({identity: value for part in everything for identity, value in part.code.items()}.values())
        with _lock:
            entry = _remembered_sites.get(self._key)
        if entry is not None and entry.counts():
            self._known, self._snapshot = dict(entry.sites), entry.snapshot
            return
        if entry is not None:
            with _lock:
                _remembered_sites.pop(self._key, None)
        self._snapshot = CodeSnapshot(self._roots)


def _description_of(locator: SiteLocator) -> Description | None:
    try:
        return Description(locator)
    except Indescribable as error:
        logger.debug("%s is not remembered: %s", type(locator).__name__, error)
        return None


def _settings() -> Hashable:
    """What of the process's settings reaches into proofs.

    Raises:
        Indescribable: a mode is active that sees each call of torch.
    """
    if torch._C._len_torch_dispatch_stack() or any(
        type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()
    ):
        raise Indescribable("a mode of torch is active")
    if any(value for name, value in vars(nn.modules.module).items() if name.startswith("_global_") and "hook" in name):
        raise Indescribable("hooks of all modules are set")
    algorithms = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    # The core's proofs have these set themselves (`probe.seeded`); a plugin's may not.
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    return (*algorithms, *modes, torch.get_float32_matmul_precision(), torch.get_default_device().type)


def _copied(sites: Sites) -> Sites:
    """The sites with mappings of their own.

    Raises:
        Indescribable: one is no plain site: it holds an object.
    """
    return tuple(map(_copy_of, sites))


def _copy_of(site: Site) -> Site:
    if type(site) is not Site:
        raise Indescribable(f"a {type(site).__name__}")
    copied: Site = object.__new__(Site)  # not `replace`, which checks hundreds of sites again
    mappings = {name: _plain(getattr(site, name)) for name in ("detail", "refuses", "left_out", "sizes")}
    vars(copied).update(vars(site), **mappings)
    return copied


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {_plain(name): _plain(each) for name, each in value.items()}
    if kind in (list, tuple):
        return kind(map(_plain, value))
    raise Indescribable(f"a {kind.__name__}")
