"""The rules that change a model besides its sites: before they are bound, or after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from veomni_core.changes.change import Change
from veomni_core.discovery.registry import Registry, load_rule
from veomni_core.planning.plan import Plan


class WholeModelRule(Protocol):
    """The methods of the class that a :class:`veomni_core.ModelRule` names. Subclass it to leave some out.

    Example:
        >>> from veomni_core.errors import BindingError
        >>> class NoBatchNorm(WholeModelRule):
        ...     def refuse(self, model):
        ...         if any(isinstance(module, nn.BatchNorm1d) for module in model.modules()):
        ...             raise BindingError("its statistics depend on the batch")
        >>> NoBatchNorm().refuse(nn.Sequential(nn.BatchNorm1d(4)))
        Traceback (most recent call last):
            ...
        veomni_core.errors.BindingError: its statistics depend on the batch
        >>> list(NoBatchNorm().changes(nn.Linear(2, 2), None, None))
        []
    """

    def refuse(self, model: nn.Module) -> None:
        """Raise ``BindingError`` if ``model`` can't be bound."""

    def release(self, model: nn.Module) -> None:
        """Take out of ``model`` what this rule put into modules that were copied from another bound model."""

    def changes(self, model: nn.Module, plan: Plan, registry: Registry) -> Iterator[tuple[str, Change]]:
        """The changes that bind ``model``, each with the path of its module."""
        yield from ()


class ModelRules:
    """The registry's model rules. Each is loaded once; one that can't be is left out, unless ops rest on its plugin."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        loaded = ((each, load_rule(registry, each, each.rule)) for each in registry.model_rules)
        self._rules = [(described, make()) for described, make in loaded if make is not None]

    def __iter__(self) -> Iterator[WholeModelRule]:
        return (rule for _, rule in self._rules)

    def changes(self, model: nn.Module, plan: Plan, *, before_sites: bool) -> Iterator[tuple[str, str, Change]]:
        """The changes of the rules with an order below 0, or of the others: module path, the rule's name, change."""
        for described, rule in self._rules:
            if (described.order < 0) is before_sites:
                for path, change in rule.changes(model, plan, self._registry):
                    yield path, described.name, change
