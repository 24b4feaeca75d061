"""Finds installed plugins by their entry points and freezes what they describe into a Registry.

A plugin that fails is recorded with its traceback and does not affect the others. Nothing depends on the order in which
plugins were installed or found.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

from veomni_core.descriptions.hookspecs import DEFINITIONS_GROUP, ENTRY_POINT_GROUP
from veomni_core.descriptions.references import load_for, raise_interrupt
from veomni_core.discovery.conflicts import CORE, claimed_twice, settle
from veomni_core.discovery.hooks import described_by
from veomni_core.discovery.installed_plugins import InstalledPlugin, installed_plugins
from veomni_core.discovery.lock_guard import FROZEN, lock_reader
from veomni_core.discovery.registry import PluginRecord, Registry, build_registry
from veomni_core.errors import ConfigError, PluginLoadError, SpecError, UnknownNameError, did_you_mean
from veomni_core.random_states import random_states_kept

_NO_KERNELS = f"which VEOMNI_PLUGINS does not leave out: declare it under {ENTRY_POINT_GROUP}"
TRIAL_TIMEOUT = "VEOMNI_PLUGIN_TIMEOUT"
_OWN_KERNELS = "veomni_ops.own_kernels"  # of the job's own code: where it has none, this was not imported
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def discover(environ: Mapping[str, str] | None = None) -> Registry:
    """Load the plugins that the environment variables allow, and return a registry of what they describe.

    - ``VEOMNI_PLUGINS``: load only these plugins (names, comma-separated). Plugins of the entry-point group
      ``veomni.definitions``, which say what ops are and where, and have no kernels, are loaded all the same;
    - ``VEOMNI_PLUGINS_BLOCK``: don't load these;
    - ``VEOMNI_DISABLE_PLUGIN_AUTOLOAD=1``: of the others load only those in ``VEOMNI_PLUGINS``, none if it is empty;
    - ``VEOMNI_PLUGINS_STRICT=1``: raise at the first plugin that fails;
    - ``VEOMNI_PLUGIN_TIMEOUT``: a plugin that no op's own plugin names is first loaded in a process of its own, which
      may take so many seconds, so that one that aborts or hangs is named; with veomni-tools the command ``veomni``
      sets 60;
    - ``VEOMNI_FROZEN``: a lock file. What is installed is compared with it before any plugin is imported, and then what
      plugins describe.

    Args:
        environ: the environment variables; ``os.environ`` without it.

    Returns:
        The registry, with a record of every installed plugin, whether it loaded, failed or was blocked.

    Raises:
        UnknownNameError: a variable names a plugin that is not installed.
        ConfigError: an on/off variable holds something other than a boolean.
        PluginLoadError: a plugin failed, under ``VEOMNI_PLUGINS_STRICT=1``.
        LockMismatchError: something differs from the lock file; the message names all of it.
        LockFileError: there is no such lock file, it is damaged, or veomni-tools, which reads it, is not installed.

    Example:
        >>> registry = discover({"VEOMNI_PLUGINS": "veomni-torch"})
        >>> registry.plugin("veomni-torch").status
        'loaded'
        >>> [spec.name for spec in registry.kernels("swiglu_mlp", "standard")]
        ['torch']
        >>> discover({"VEOMNI_PLUGINS": "veomni-tortch"})
        Traceback (most recent call last):
            ...
        veomni_core.errors.UnknownNameError: VEOMNI_PLUGINS: no plugin 'veomni-tortch' is installed. Did you mean
        'veomni-torch'?
    """
    environ = os.environ if environ is None else environ
    strict = read_switch(environ, "VEOMNI_PLUGINS_STRICT")
    make_guard = lock_reader(environ, "locked:Guard")
    guard = make_guard(environ[FROZEN].strip()) if make_guard else None
    if guard:
        guard.refuse_changed_files()
    described = describe(environ)
    if guard:
        guard.refuse_changed_specs(described)
    records = settle(described)
    if strict:
        _raise_first(records)
    return build_registry(records, claimed_twice(records))


def describe(environ: Mapping[str, str]) -> list[PluginRecord]:
    """A record of the core and of every installed plugin as it describes itself, not yet compared with the others.

    Loads the plugins that ``environ`` allows.

    Raises:
        UnknownNameError, ConfigError: as of :func:`discover`.
    """
    found = installed_plugins()
    policy = _Policy.read(environ, found)
    records = {
        plugin: policy.refuse(plugin) or (_load(plugin) if plugin.defines or plugin.problem else None)
        for plugin in _name_once(found)
    }
    waiting = [plugin for plugin, record in records.items() if record is None]
    ops = [op for record in records.values() if record for op in record.ops]
    vouched_for = {distribution for op in ops for distribution in op.published.values()}
    problems = _on_trial([plugin for plugin in waiting if plugin.distribution not in vouched_for], environ)
    for plugin in waiting:
        records[plugin] = _load(replace(plugin, problem=problems.get(plugin.module, "")))
    own = sys.modules.get(_OWN_KERNELS)
    return [CORE, *filter(None, records.values()), *(own.KERNEL_REGISTRY.records() if own else ())]


def _on_trial(plugins: list[InstalledPlugin], environ: Mapping[str, str]) -> dict[str, str]:
    """How plugins that no op names end or hold a process that loads them, by module; by veomni-tools, if required."""
    seconds = environ.get(TRIAL_TIMEOUT, "").strip()
    if not (seconds and plugins):
        return {}
    purpose = f"{TRIAL_TIMEOUT}={seconds} loads plugins on trial, and"
    return load_for(purpose, ConfigError, "veomni_tools.plugin_trial:tried")(plugins, seconds)  # type: ignore[no-any-return]


def read_switch(environ: Mapping[str, str], name: str) -> bool:
    """The boolean in the environment variable ``name``; False if it is unset."""
    value = environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(f"{name}={environ[name]!r} is not a boolean: write 1 or 0")


def _record(plugin: InstalledPlugin, **changes: Any) -> PluginRecord:
    named = (plugin.name, plugin.distribution, plugin.version, plugin.module)
    return PluginRecord(*named, defines=plugin.defines, **changes)


def _failed(plugin: InstalledPlugin, problem: str, **changes: Any) -> PluginRecord:
    return _record(plugin, status="failed", problem=problem, **changes)


def _name_once(found: Iterable[InstalledPlugin]) -> list[InstalledPlugin]:
    """Mark plugins that share their name with another one. None of them loads: which one is meant can't be known."""
    by_name = defaultdict(list)
    for plugin in found:
        by_name[plugin.name].append(plugin)
    for name, bearers in by_name.items():
        if len(bearers) > 1:
            who = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in bearers)
            problem = f"plugin name {name!r} is registered by {who}; uninstall all but one"
            by_name[name] = [replace(plugin, problem=problem) for plugin in bearers]
    return [plugin for bearers in by_name.values() for plugin in bearers]


@dataclass(frozen=True)
class _Policy:
    """Which plugins may be imported, decided before any of them is."""

    allowed: frozenset[str] | None
    blocked: frozenset[str]
    allowed_by: str

    @classmethod
    def read(cls, environ: Mapping[str, str], found: Iterable[InstalledPlugin]) -> _Policy:
        known = {name for plugin in found for name in (plugin.name, plugin.distribution)}
        allowed = _names(environ, "VEOMNI_PLUGINS", known)
        blocked = _names(environ, "VEOMNI_PLUGINS_BLOCK", known)
        if both := sorted(allowed & blocked):
            raise ConfigError(f"{', '.join(both)}: named in VEOMNI_PLUGINS and in VEOMNI_PLUGINS_BLOCK; remove one")
        if read_switch(environ, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD"):
            return cls(allowed, blocked, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD is set and VEOMNI_PLUGINS doesn't name it")
        return cls(allowed or None, blocked, "VEOMNI_PLUGINS doesn't name it")

    def refuse(self, plugin: InstalledPlugin) -> PluginRecord | None:
        names = {plugin.name, plugin.distribution}
        if names & self.blocked:
            return _record(plugin, status="blocked", problem="VEOMNI_PLUGINS_BLOCK names it")
        if self.allowed is not None and not names & self.allowed and not plugin.defines:
            return _record(plugin, status="blocked", problem=self.allowed_by)
        return None


def _names(environ: Mapping[str, str], variable: str, known: set[str]) -> frozenset[str]:
    names = frozenset(name.strip() for name in environ.get(variable, "").split(",") if name.strip())
    for name in sorted(names - known):
        raise UnknownNameError(f"{variable}: no plugin {name!r} is installed. {did_you_mean(name, known)}")
    return names


def _load(plugin: InstalledPlugin) -> PluginRecord:
    if plugin.problem:
        return _failed(plugin, plugin.problem)
    start = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr), random_states_kept(only_while_alone=True):  # both are the process's own
            described = described_by(importlib.import_module(plugin.module))
    except BaseException as error:  # a plugin may raise anything while it is imported
        raise_interrupt(error)
        reason = str(error) if isinstance(error, SpecError) else f"{type(error).__name__}: {error}".removesuffix(": ")
        return _failed(plugin, reason, traceback=traceback.format_exc(), seconds=time.perf_counter() - start)
    if plugin.defines and described["kernels"]:
        return _failed(plugin, f"it has kernels, and is in the entry-point group {DEFINITIONS_GROUP}, {_NO_KERNELS}")
    return _record(plugin, seconds=time.perf_counter() - start, **described)


def _raise_first(records: Iterable[PluginRecord]) -> None:
    for record in records:
        if record.status == "failed":
            detail = f"\n{record.traceback}" if record.traceback else ""
            raise PluginLoadError(f"plugin {record.name} of {record} failed to load: {record.problem}{detail}")
        for skipped in record.skipped:
            raise PluginLoadError(f"plugin {record.name} of {record} failed to load: {skipped}")
    for key, who in claimed_twice(records).items():
        raise PluginLoadError(f"kernel {key[0]}/{key[1]}:{key[2]} is claimed by {' and '.join(who)}")
