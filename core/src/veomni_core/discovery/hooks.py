"""Asks one plugin's module for its descriptions, through the hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import pluggy

from veomni_core.descriptions import hookspecs
from veomni_core.descriptions.references import load_attribute
from veomni_core.errors import SpecError


def described_by(module: Any) -> dict[str, tuple[Any, ...]]:
    """Call each hook of one plugin, in a separate pluggy manager, so that plugins can't interfere with each other."""
    _check_api_versions(module)
    mark = f"{hookspecs.PROJECT}_impl"
    for hook in hookspecs.DESCRIPTIONS:
        if callable(function := vars(module).get(hook)) and not hasattr(function, mark):
            raise SpecError(f"{module.__name__}.{hook} is not marked with @hookimpl, so nothing would call it")
    implemented = (
        (name, each, getattr(each, "__code__", None), str(getattr(each, mark)))
        for name, each in vars(module).items()
        if hasattr(type(each), "__get__") and hasattr(each, mark)  # nothing else can be a function
    )
    manager, described = _manager_of(module.__name__, *implemented), {}
    for hook, (field, kind) in hookspecs.DESCRIPTIONS.items():
        try:
            answers = getattr(manager.hook, hook)()
        except SpecError as error:
            raise SpecError(f"{hook}() of {module.__name__}: {error}") from error
        described[field] = tuple(item for answer in answers for item in _checked(hook, kind, answer))
    return described


@lru_cache(maxsize=64)
def _manager_of(module: str, *implemented: tuple[Any, ...]) -> pluggy.PluginManager:
    """pluggy's manager of these functions alone. Making one takes longer than what most of them return."""
    manager, plugin = pluggy.PluginManager(hookspecs.PROJECT), ModuleType(module)
    vars(plugin).update({name: function for name, function, *_ in implemented})
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise SpecError(f"{error}. Hooks: {', '.join(hookspecs.DESCRIPTIONS)}") from error
    return manager


def _check_api_versions(module: Any) -> None:
    """Check that core and plugin have an API version in common; a plugin names one, or its oldest and newest."""
    declared = getattr(module, "VEOMNI_PLUGIN_API_VERSION", None)
    here = hookspecs.PLUGIN_API_VERSIONS
    supported = f"version {here[0]}" if len(here) == 1 else f"versions {here[0]} to {here[-1]}"
    if declared is None:
        raise SpecError(f"{module.__name__} declares no VEOMNI_PLUGIN_API_VERSION; this core supports {supported}")
    pair = declared if isinstance(declared, tuple) else (declared, declared)
    if len(pair) != 2 or not all(type(each) is int for each in pair) or pair[0] > pair[1]:
        raise SpecError(
            f"{module.__name__}: VEOMNI_PLUGIN_API_VERSION must be a version, or (oldest, newest), not {declared!r}"
        )
    if pair[1] < here[0] or pair[0] > here[-1]:
        said = f"version {declared!r}" if pair[0] == pair[1] else f"versions {pair[0]} to {pair[1]}"
        newer, older = "Install a newer version of the plugin, or an older", "or install an older version of the plugin"
        remedy = f"{newer} veomni-core" if pair[1] < here[0] else f"Upgrade veomni-core, {older}"
        raise SpecError(f"{module.__name__} has plugin API {said}; this core supports {supported}. {remedy}")


def _checked(hook: str, described: type | str, answer: Any) -> list[Any]:
    kind: type = load_attribute(described) if isinstance(described, str) else described
    if isinstance(answer, (str, Mapping)) or not isinstance(answer, Iterable):
        raise SpecError(f"{hook}() must return a list of {kind.__name__}, not {type(answer).__name__}")
    for position, item in enumerate(items := list(answer)):
        if not isinstance(item, kind):
            raise SpecError(f"{hook}() item {position} must be a {kind.__name__}, not {type(item).__name__}: {item!r}")
    return items
