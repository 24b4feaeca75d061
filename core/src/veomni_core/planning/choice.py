"""What one config field requests: kernels in order of preference, for the module paths that a glob matches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.descriptions.spec import EAGER
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError, UnknownNameError, did_you_mean

AUTO = "auto"
DEFAULT = "default"


@dataclass(frozen=True)
class Requested:
    """One entry of a config field: a kernel's name, ``eager`` or ``auto``."""

    name: str


@dataclass(frozen=True)
class Group:
    """The module paths that one glob of a config field matches, and what is requested for them.

    Attributes:
        glob: the glob; ``None`` for the paths that no glob of the field matches.
        requested: the entries, in order of preference.
    """

    glob: str | None
    requested: tuple[Requested, ...]

    def covers(self, path: str) -> bool:
        """Whether the glob matches a module's path."""
        return self.glob is None or fnmatchcase(path, self.glob)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the entries."""
        return tuple(entry.name for entry in self.requested)


@dataclass(frozen=True)
class Choice:
    """What one config field requests.

    Attributes:
        op_name, config_field: the op, and its key under ``ops_implementation``.
        asked: the value as it stands in the config, or in the preset.
        groups: what is requested per glob, in the config's order. The last has no glob: it is for all other paths.
        preset: the name of the preset that filled the field; ``None`` if the config writes it.
    """

    op_name: str
    config_field: str
    asked: Any
    groups: tuple[Group, ...]
    preset: str | None = None

    @property
    def written(self) -> bool:
        """Whether the config writes the field."""
        return self.preset is None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the field mentions."""
        return tuple(dict.fromkeys(name for group in (self.groups[-1], *self.groups[:-1]) for name in group.names))

    def group_for(self, path: str) -> Group:
        """The first group that covers a module's path."""
        return next(group for group in self.groups if group.covers(path))


def preset_choice(op: OpSpec, preset: str, name: str) -> Choice:
    """The choice of a field that the config leaves out and ``preset`` fills with ``name``."""
    return Choice(op.name, op.config_field, name, (Group(None, (Requested(name),)),), preset)


def written_choice(op: OpSpec, value: Any, registry: Registry) -> Choice:
    """The choice of a field that the config writes, with every name in it checked against ``registry``.

    Raises:
        UnknownNameError: no kernel has one of the names; the message suggests the nearest spelling.
        ConfigError: the value has the wrong type.
    """
    where = op.config_field
    if not isinstance(value, Mapping):
        return Choice(op.name, where, value, (Group(None, _entries(op, where, value, registry)),))
    globs = {str(glob): value[glob] for glob in value}
    default = Group(None, _entries(op, f"{where}.{DEFAULT}", globs.pop(DEFAULT, EAGER), registry))
    groups = (Group(glob, _entries(op, f"{where}[{glob!r}]", each, registry)) for glob, each in globs.items())
    return Choice(op.name, where, dict(value), (*groups, default))


def shown(value: Any) -> str:
    """A value of the wrong type, for messages."""
    return "got nothing" if value is None else f"got {value!r} ({type(value).__name__})"


def _entries(op: OpSpec, where: str, value: Any, registry: Registry) -> tuple[Requested, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{where}: expected a kernel's name, a list of names, or a mapping from module paths to these; "
            f"{shown(value)}"
        )
    known = [EAGER, AUTO, *registry.known_values(op.name)]
    return tuple(Requested(_checked_name(op, where, name, known, registry)) for name in names)


def _checked_name(op: OpSpec, where: str, name: str, known: list[str], registry: Registry) -> str:
    if name in known:
        return name
    if name in op.legacy_values:
        present = op.legacy_values[name]
        warnings.warn(f"{where}: {name} is now called {present}; please write that", FutureWarning, stacklevel=6)
        return present
    message = f"{where}: {name!r} is unknown. {did_you_mean(name, known)}"
    for plugin in registry.failed():
        message += f" (It may belong to {plugin}, which failed to load: {plugin.problem})"
    raise UnknownNameError(message)
