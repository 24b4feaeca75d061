"""What one config field requests: kernels in order of preference, for the module paths that a glob matches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.descriptions.references import load_if_installed
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError, UnknownNameError, did_you_mean

AUTO = "auto"
DEFAULT = "default"
KERNEL, OPTIONS = "kernel", "options"  # the keys of an entry that sets options


@dataclass(frozen=True)
class Requested:
    """One entry of a config field: a kernel's name, ``eager`` or ``auto``; and what the job sets of its options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()


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
        preset: the name of the preset that filled the field; ``None`` if the config writes the field.
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
    if not isinstance(value, Mapping) or KERNEL in value:
        return Choice(op.name, where, value, (Group(None, _entries(op, where, value, registry)),))
    globs = {str(glob): value[glob] for glob in value}
    default = Group(None, _entries(op, f"{where}.{DEFAULT}", globs.pop(DEFAULT, EAGER), registry))
    groups = (Group(glob, _entries(op, f"{where}[{glob!r}]", each, registry)) for glob, each in globs.items())
    return Choice(op.name, where, dict(value), (*groups, default))


_NOTHING = ". Leave the field out for the preset's kernel, or write eager for the model's own code"


def shown(value: Any) -> str:
    """A value of the wrong type, for messages."""
    return "got nothing" if value is None else f"got {value!r} ({type(value).__name__})"


def expect(holds: bool, name: str, value: Any, what: str) -> None:
    """Raise ``ConfigError`` unless it holds that ``value`` of the setting or the argument ``name`` is ``what``."""
    if not holds:
        raise ConfigError(f"{name}: expected {what}, {shown(value)}")


def is_finite(value: Any) -> bool:
    """Whether it is a number: no boolean, NaN or infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _entries(op: OpSpec, where: str, value: Any, registry: Registry) -> tuple[Requested, ...]:
    entries = value if isinstance(value, list) else [value]
    names = [entry.get(KERNEL) if isinstance(entry, Mapping) else entry for entry in entries]
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{where}: expected a kernel's name, {{kernel: name, options: {{...}}}}, a list of these, or a mapping "
            f"from module paths to these; {shown(value)}{_NOTHING if value is None else ''}"
        )
    known = [EAGER, AUTO, *registry.known_values(op.name)]
    return tuple(_requested(op, where, entry, known, registry) for entry in entries)


def _requested(op: OpSpec, where: str, entry: Any, known: list[str], registry: Registry) -> Requested:
    if isinstance(entry, str):
        return Requested(_checked_name(op, where, entry, known, registry))
    for key in entry:
        if key not in (KERNEL, OPTIONS):
            raise ConfigError(f"{where}: {key!r} is unknown beside {KERNEL!r}. {did_you_mean(str(key), [OPTIONS])}")
    name = _checked_name(op, where, entry[KERNEL], known, registry)
    options = entry.get(OPTIONS) or {}
    expect(isinstance(options, Mapping), f"{where}: {OPTIONS}", options, "a mapping from names to values")
    return Requested(name, _checked_options(op, where, name, options, registry))


def _checked_options(
    op: OpSpec, where: str, name: str, values: Mapping[str, Any], registry: Registry
) -> tuple[tuple[str, Any], ...]:
    """The values by name, sorted. A kernel's variants may differ in their options; one of them must take these."""
    if values and name in (EAGER, AUTO):
        raise ConfigError(f"{where}: {name} has no options; name the kernel that they are for")
    problems = []
    for spec in (spec for spec in registry.kernels(op.name) if spec.name == name):
        try:
            return spec.configured(where, values).settings
        except ConfigError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    # No kernel of that name is installed: planning says so.
    return tuple(sorted((str(key), str(value)) for key, value in values.items()))


def _checked_name(op: OpSpec, where: str, name: str, known: list[str], registry: Registry) -> str:
    if name in known:
        return name
    if name in op.legacy_values:
        present = op.legacy_values[name]
        warnings.warn(f"{where}: {name} is now called {present}; please write that", FutureWarning, stacklevel=6)
        return present
    hint = load_if_installed("veomni_ops.veomni_names:only_elsewhere")
    message = f"{where}: {name!r} is unknown. {(hint and hint(name)) or did_you_mean(name, known)}"
    for plugin in registry.failed():
        message += f" (It may belong to {plugin}, which failed to load: {plugin.problem})"
    for skipped in (each for plugin in registry.plugins for each in plugin.skipped if each.spec.name == name):
        message += f" (Left out: {skipped})"
    raise UnknownNameError(message)
