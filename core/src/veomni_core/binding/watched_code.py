"""Sees when code is replaced after bind that proofs of the bound sites have read: in a class, a file, a table.

A kernel computes what that code did. Forwards don't look, so that they pay nothing. Reading the receipt looks, and so
does putting the model into training mode, which a ``Trainer`` does in each step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from veomni_core.changes.bound_subclass import bindings_in
from veomni_core.changes.change import Change, ClassChange, ForwardChange
from veomni_core.errors import CodeChangedWarning
from veomni_core.sites.proven_model import CodeRead, forward_of
from veomni_core.sites.walk import named_modules

_NAMED = 3  # sites that a warning names of one place; the receipt has all


class WatchedCode(CodeRead):
    """The places whose code the proofs of a binding's sites have read. Copies of the binding share it."""

    def __init__(self, former: CodeRead | None = None) -> None:
        super().__init__(former)
        self.has_sites = former is not None
        self._warned: set[str] = set()

    def watched(self, changes: Iterable[tuple[str, str, Change]]) -> Iterator[tuple[str, str, Change]]:
        """``changes`` of rules for whole models, whose new forwards keep the former ones: these are watched too."""
        for path, rule, change in changes:
            if isinstance(change, ForwardChange):
                self.add(forward_of(change.target), f"the rule {rule!r}", path)
            yield path, rule, change

    def changed(self) -> dict[str, str]:
        """By module path, what was replaced that the proof of a site there has read. Warns of each replacement once."""
        if not self.replaced:  # as nearly always, and a Trainer asks in each step
            return {}
        known: dict[Hashable, str] = {}
        reasons: dict[str, dict[str, list[str]]] = {}
        readers: dict[str, dict[str, None]] = {}
        for reader, places, paths in self:
            for place in places:
                if place.key not in known:
                    known[place.key] = place.replaced()
                if what := known[place.key]:
                    readers.setdefault(what, {}).update(dict.fromkeys(f"{reader} at {path}" for path in paths))
                    for path in paths:
                        reasons.setdefault(path, {}).setdefault(what, []).append(reader)
        self._warn({what: [*sites] for what, sites in readers.items() if what not in self._warned})
        return {
            path: "; ".join(f"{what} after bind, and {' and '.join(by)} had read it" for what, by in found.items())
            for path, found in reasons.items()
        }

    def warn_of_settings(self, written: Mapping[str, str]) -> None:
        """Warn once of settings that were written past the guard, by module path."""
        news = {path: what for path, what in written.items() if f"{path}: {what}" not in self._warned}
        self._warned.update(f"{path}: {what}" for path, what in news.items())
        if news:
            path, what = next(iter(news.items()))
            more = f", and so at {len(news) - 1} more modules" if len(news) > 1 else ""
            advice = "Undo the binding and bind again; receipt.changed has all of them"
            warnings.warn(f"{path}: {what}{more}. {advice}", CodeChangedWarning, stacklevel=4)

    def _warn(self, news: dict[str, list[str]]) -> None:
        self._warned.update(news)
        if news:
            listed = "; ".join(f"{what}, which {_listed(sites)} had read" for what, sites in news.items())
            message = (
                f"after bind {listed}. The kernels there compute what the former code did. Take it back, or undo the "
                "binding and bind again, so that the new code is proven. receipt.changed has all sites"
            )
            warnings.warn(message, CodeChangedWarning, stacklevel=4)


def look_when_training_starts(model: nn.Module) -> Iterator[Change]:
    """The change by which ``model.train()`` looks for replaced code; ``eval()`` doesn't."""
    # A wrapper that hands what is set on it to the module within, as a compiled model does, can't be given a class.
    settable = (each for _, each in named_modules(model) if type(each).__setattr__ is nn.Module.__setattr__)
    if (module := next(settable, None)) is not None:
        yield _TrainingStarts(module, "train", _looking(type(module).train))


class _TrainingStarts(ClassChange):
    def overridden(self) -> str:
        """Always empty: that nobody looks any more changes nothing of what runs."""
        return ""


def _looking(former: Callable[..., Any]) -> Callable[..., Any]:
    def train(self: nn.Module, mode: bool = True) -> Any:
        for owner in bindings_in(self) if mode else ():
            owner.binding.look_at_code()
        return former(self, mode)

    return train


def _listed(sites: list[str]) -> str:
    more = len(sites) - _NAMED
    return ", ".join(sites[:_NAMED]) + (f" and {more} more" if more > 0 else "")
