"""A model's choice of attention, set in configs that are the model's own.

Several models may share a config object. So a binding gives the model copies of its configs, the nested ones included,
and sets the interface's name there. Undoing puts the shared objects back, and repeats on them every edit of the copies.

A name that is registered for one bound model alone stays with it: :mod:`veomni_transformers.attention.lent_names`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import nn
from transformers import PretrainedConfig

from veomni_core.changes.change import Change
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.sites.walk import named_modules
from veomni_transformers.attention.interface_names import calls_beneath, is_in_use
from veomni_transformers.attention.kernel_lookup import looked_up, looks_up
from veomni_transformers.attention.lent_names import NAME, lend, take_back

_OWN = "_veomni_own_configs"


def config_changes(
    model: nn.Module, path: str, name: str, own: bool = False, runs: Mapping[str, Any] | None = None
) -> Iterator[Change]:
    """Select the interface ``name`` for every module that shares the config at ``path``, in no other model.

    ``own``: the model gets configs of its own also where ``name`` is what it is set to. ``runs`` has the attention
    function of each attention module, by its path.
    """
    module = model.get_submodule(path)
    if (own or interface_of(module) != name) and _OWN not in vars(model):
        yield OwnConfigs(model)
    yield InterfaceChange(model, module, name, runs or {})


def interface_of(module: Any) -> str:
    """The name of the attention interface that ``module``'s config selects."""
    return str(module.config._attn_implementation)


def is_eager(interface: str) -> bool:
    """Whether a model whose config selects ``interface`` runs its own eager function; a config may select none."""
    return interface in (EAGER, str(None))


def select_interface(config: Any, name: str) -> None:
    """Select the interface ``name`` for the modules that read ``config``, but not for those of configs nested in it."""
    setattr(config, NAME, name)


class OwnConfigs:
    """Gives one model copies of its config objects, whichever modules and attributes hold them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._copied: list[_Copied] = []

    def apply(self) -> None:
        model: Any = self._model()
        found: dict[int, Any] = {}
        for _, module in named_modules(model):
            for value in vars(module).values():
                _collect(value, found)
        copies = {identity: copy.copy(config) for identity, config in found.items()}
        for own in copies.values():
            _replace(own, copies)
        self._copied = [_Copied(config, copies[identity]) for identity, config in found.items()]
        for _, module in named_modules(model):
            _replace(module, copies)
        vars(model)[_OWN] = self

    def revert(self) -> None:
        """Carry edits of the copies over to the shared configs, and put those back into every module."""
        model = self._model()
        if model is None:
            return
        former = {id(each.own): each.shared for each in self._copied}
        for each in self._copied:
            each.carry_edits_over(former)
        for _, module in named_modules(model):
            _replace(module, former)
        vars(model).pop(_OWN, None)

    def hand_over(self, config: Any) -> Any:
        """Give the model a copy of ``config``, one of its own configs, which another model keeps; returns the copy."""
        copied = object.__new__(type(config))
        vars(copied).update(vars(config))
        replacement = {id(config): copied}
        for each in self._copied:
            each.own = copied if each.own is config else each.own
            _replace(each.own, replacement)
        model = self._model()
        for _, module in named_modules(model) if model is not None else ():
            _replace(module, replacement)
        return copied

    def holds(self, config: Any) -> bool:
        """Whether ``config`` is one of the model's."""
        return any(each.own is config for each in self._copied)

    def overridden(self) -> str:
        """Always empty: edits of the copies, and configs that were put in their place, are the user's and stay."""
        return ""

    def suspended(self) -> AbstractContextManager[None]:
        """A no-op: the copies select what the shared configs select."""
        return nullcontext()

    @property
    def place(self) -> Hashable:
        return (id(self._model()), _OWN)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnConfigs:
        model: Any = self._model()
        duplicate = OwnConfigs(copy.deepcopy(model, memo))
        memo[id(self)] = duplicate
        duplicate._copied = copy.deepcopy(self._copied, memo)
        return duplicate


class _Copied:
    """One shared config, its copy, and the attributes that the copy had at first."""

    def __init__(self, shared: Any, own: Any) -> None:
        self.shared, self.own, self.at_first = shared, own, dict(vars(own))

    def carry_edits_over(self, former: dict[int, Any]) -> None:
        """Set on the shared config what was set on the copy, and delete what was deleted."""
        for name in {**self.at_first, **vars(self.own)}:
            if name not in vars(self.own):
                vars(self.shared).pop(name, None)
            elif name not in self.at_first or vars(self.own)[name] is not self.at_first[name]:
                value = vars(self.own)[name]
                vars(self.shared)[name] = former.get(id(value), value)


class InterfaceChange:
    """Sets the name of the attention interface in the config that ``module`` holds, and in that one alone.

    Masks are then built for ``runs``: each attention module's function, by its path.
    """

    def __init__(self, model: nn.Module, module: nn.Module, name: str, runs: Mapping[str, Any]) -> None:
        self._model, self._module = weakref.ref(model), weakref.ref(module)
        self.name, self._runs = name, runs
        self._kinds: set[tuple[str, str]] = set()  # of the modules in ``runs``
        self._before: Any = None

    def apply(self) -> None:
        config, model = self._config(), cast(nn.Module, self._model())
        self._kinds = {_kind(module) for path, module in named_modules(model) if path in self._runs}
        self._before = config._attn_implementation
        self._select(config, self.name)

    def revert(self) -> None:
        if (config := self._config()) is not None:
            named = config._attn_implementation
            self._select(config, self._before if named == self.name else named)

    def overridden(self) -> str:
        model, config = self._model(), self._config()
        if model is None or config is None:
            return ""
        found = config._attn_implementation
        if found != self.name:
            return "" if calls_beneath(str(found)) == self.name else f"its attention was set to {found}"
        stranger = next((path for path, module in named_modules(model) if self._is_strange(path, module)), "")
        return f"{stranger} runs attention of its own, with masks built for the kernel" if stranger else ""

    def _is_strange(self, path: str, module: nn.Module) -> bool:
        """Whether other code has put in attention of another function, also of another model, beneath a wrapper."""
        if path in self._runs:
            return looks_up(module) and looked_up(module) is not self._runs[path]
        own: OwnConfigs | None = vars(self._model()).get(_OWN)
        foreign = _kind(module) in self._kinds and own is not None and not own.holds(vars(module).get("config"))
        return foreign and looks_up(module) and looked_up(module) not in self._runs.values()

    @property
    def place(self) -> Hashable:
        return (id(self._config()), NAME)

    def _config(self) -> Any:
        return getattr(self._module(), "config", None)

    def _select(self, config: Any, name: str) -> None:
        model = self._model()
        if model is not None and is_in_use(name):
            lend(config, name, model, vars(model)[_OWN].hand_over)
        else:
            take_back(config)
            select_interface(config, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> InterfaceChange:
        model: Any = copy.deepcopy(self._model(), memo)
        duplicate = InterfaceChange(model, copy.deepcopy(self._module(), memo), self.name, self._runs)  # type: ignore[arg-type]
        duplicate._before, duplicate._kinds = self._before, self._kinds
        if is_in_use(self.name) and interface_of(self._module()) == self.name:  # the copied config names what leaves
            own = copy.deepcopy(vars(self._model())[_OWN], memo)
            lend(copy.deepcopy(self._config(), memo), self.name, model, own.hand_over)
        return duplicate


def _kind(module: nn.Module) -> tuple[str, str]:
    """The name of its class; that of a bound module is the same."""
    return type(module).__module__, type(module).__qualname__


def _collect(value: Any, found: dict[int, Any]) -> None:
    """``value`` and every config within it, by identity."""
    if isinstance(value, PretrainedConfig) and id(value) not in found:
        found[id(value)] = value
        for inner in vars(value).values():
            _collect(inner, found)


def _replace(holder: Any, replacements: dict[int, Any]) -> None:
    for name, value in vars(holder).items():
        if id(value) in replacements:
            vars(holder)[name] = replacements[id(value)]
