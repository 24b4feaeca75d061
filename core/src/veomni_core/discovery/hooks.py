"""Asks one plugin's module for its descriptions, through the hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import isroutine
from types import ModuleType
from typing import Any

import pluggy

from veomni_core.descriptions import hookspecs
from veomni_core.descriptions.references import load_attribute
from veomni_core.errors import SpecError


def described_by(module: Any) -> dict[str, tuple[Any, ...]]:
    """Call each hook of one plugin, in a separate pluggy manager, so that plugins can't interfere with each other."""
    _check_api_versions(module)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(_marked(hookspecs, "spec"))
    manager.register(_marked(module, "impl"))
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise SpecError(f"{error}. Hooks: {', '.join(hookspecs.DESCRIPTIONS)}") from error
    described = {}
    for hook, (field, kind) in hookspecs.DESCRIPTIONS.items():
        try:
            answers = getattr(manager.hook, hook)()
        except SpecError as error:
            raise SpecError(f"{hook}() of {module.__name__}: {error}") from error
        described[field] = tuple(item for answer in answers for item in _checked(hook, kind, answer))
    return described


def _marked(module: Any, mark: str) -> ModuleType:
    """What pluggy would find in ``module``. It looks at each name there, for every plugin of every search."""
    found = ModuleType(module.__name__)
    marked = f"{hookspecs.PROJECT}_{mark}"
    vars(found).update({name: each for name, each in vars(module).items() if isroutine(each) and hasattr(each, marked)})
    return found


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
    items = list(answer)
    for position, item in enumerate(items):
        if not isinstance(item, kind):
            raise SpecError(f"{hook}() item {position} must be a {kind.__name__}, not {type(item).__name__}: {item!r}")
    return items
