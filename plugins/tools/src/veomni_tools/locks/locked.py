"""Compares what is installed, and what its plugins describe, with a lock file. Imports no plugin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from veomni_conformance.installed_files import combined, hashed_files
from veomni_core.discovery.conflicts import CORE
from veomni_core.discovery.installed_plugins import installed_plugins
from veomni_core.discovery.registry import PluginRecord
from veomni_core.errors import HostError, LockMismatchError
from veomni_core.jobs.jobfile import at_home
from veomni_ops.own_kernels import THIS_PROCESS
from veomni_tools.locks.lock_file import Lock, LockedDistribution, LockedPlugin, read_lock, shortened
from veomni_tools.locks.spec_hashes import spec_hashes

_NAMED = 5  # files or specs that a message names; the others are counted


class Guard:
    """Refuses what differs from the lock file ``name``; what the core asks under ``VEOMNI_FROZEN``.

    Raises:
        LockFileError: there is no such file, or it is damaged.
    """

    def __init__(self, name: str) -> None:
        self.lock = read_lock(at_home(name))

    def refuse_changed_files(self) -> None:
        """Raise LockMismatchError unless just the locked distributions are installed, with the same files."""
        refuse_changed_files(self.lock)

    def refuse_changed_specs(self, records: Iterable[PluginRecord]) -> None:
        """Raise LockMismatchError if a plugin that loaded describes something else, or failed since."""
        refuse_changed_specs(self.lock, records)


def installed() -> dict[str, LockedDistribution]:
    """veomni-core and every distribution with a plugin, with its files as they are on disk.

    Raises:
        HostError: veomni-core is not installed, or metadata or a file can't be read.
    """
    plugins: dict[str, dict[str, LockedPlugin]] = defaultdict(dict)
    found: dict[str, Distribution] = {}
    for plugin in installed_plugins():
        if plugin.problem:
            raise HostError(f"plugin {plugin.name} of {plugin.distribution} can't be locked: {plugin.problem}")
        found[plugin.distribution] = plugin.metadata
        plugins[plugin.distribution][plugin.name] = LockedPlugin(plugin.module)
    try:
        found[CORE.distribution] = distribution(CORE.distribution)
    except PackageNotFoundError:
        raise HostError(f"{CORE.distribution} is not installed, so it can't be compared: pip install it") from None
    plugins[CORE.distribution][CORE.name] = LockedPlugin(CORE.module)
    return {name: _as_installed(found[name], plugins[name]) for name in sorted(found)}


def with_specs(distributions: Mapping[str, LockedDistribution], records: Iterable[PluginRecord]) -> Lock:
    """``distributions`` as a lock, with what their plugins describe by themselves."""
    specs = {(record.distribution, record.name): spec_hashes(record) for record in records if record.healthy}

    def described(name: str, locked: LockedDistribution) -> LockedDistribution:
        plugins = {
            plugin: LockedPlugin(each.module, shortened(specs[name, plugin]), combined(specs[name, plugin]))
            if (name, plugin) in specs
            else each
            for plugin, each in locked.plugins.items()
        }
        return LockedDistribution(locked.version, locked.files, locked.sha256, plugins)

    return Lock({name: described(name, locked) for name, locked in distributions.items()})


def refuse_changed_files(lock: Lock) -> None:
    """Raise LockMismatchError unless just the distributions of ``lock`` are installed, with the same files."""
    here = installed()
    changes = [f"{name} {each.version} is not installed any more" for name, each in _only(lock.distributions, here)]
    changes += [f"{name} {each.version} was added" for name, each in _only(here, lock.distributions)]
    for name in sorted(here.keys() & lock.distributions.keys()):
        changes += _changes(name, lock.distributions[name], here[name])
    if changes:
        raise mismatch(lock, "what is installed", changes)


def refuse_changed_specs(lock: Lock, records: Iterable[PluginRecord]) -> None:
    """Raise LockMismatchError if a plugin that loaded describes something else than in ``lock``, or failed since.

    A plugin that is blocked runs no code, so it is not compared.
    """
    changes = []
    for record in records:
        if record.distribution == THIS_PROCESS:
            kernels = ", ".join(map(str, record.kernels))
            changes.append(f"{record}: the job's own code has registered {kernels}; a lock has what is installed")
            continue
        locked = lock.distributions[record.distribution].plugins[record.name]
        if record.status == "failed" and locked.specs_sha256:
            changes.append(f"{record}: plugin {record.name} loaded then, and fails now: {record.problem}")
        if record.healthy and not locked.specs_sha256:
            changes.append(f"{record}: plugin {record.name} did not load then, and does now")
        elif record.healthy:
            hashes = spec_hashes(record)
            if combined(hashes) != locked.specs_sha256:
                changes.append(f"{record}: plugin {record.name}: {_differences(locked.specs, shortened(hashes))}")
    if changes:
        raise mismatch(lock, "what plugins describe", sorted(changes))


def mismatch(lock: Lock, what: str, changes: Iterable[str]) -> LockMismatchError:
    """The error that names all ``changes`` since ``lock`` was written."""
    listed = "\n".join(f"  - {change}" for change in changes)
    return LockMismatchError(
        f"{what} differs from {lock.path}:\n{listed}\nRestore it; or accept the change, by writing the file again with "
        "`veomni lock`, without --frozen"
    )


def _as_installed(each: Distribution, plugins: Mapping[str, LockedPlugin]) -> LockedDistribution:
    hashes = hashed_files(each, [plugin.module for plugin in plugins.values()])
    return LockedDistribution(each.version, shortened(hashes), combined(hashes), dict(sorted(plugins.items())))


def _only(
    these: Mapping[str, LockedDistribution], those: Mapping[str, LockedDistribution]
) -> list[tuple[str, LockedDistribution]]:
    return [(name, each) for name, each in sorted(these.items()) if name not in those]


def _changes(name: str, locked: LockedDistribution, here: LockedDistribution) -> list[str]:
    changes = []
    if locked.version != here.version:
        changes.append(f"{name}: version {locked.version} -> {here.version}")
    if locked.sha256 != here.sha256:
        changes.append(f"{name} {here.version}: {_differences(locked.files, here.files)}")
    before, now = ({plugin: each.module for plugin, each in one.plugins.items()} for one in (locked, here))
    if before != now:
        changes.append(f"{name} {here.version}: its plugins: {_differences(before, now)}")
    return changes


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What changed, was added or is gone: how many, and their names."""
    parts = {
        "changed": [name for name in before if name in now and before[name] != now[name]],
        "added": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
    }
    said = [f"{len(names)} {what}: {_listed(names)}" for what, names in parts.items() if names]
    return "; ".join(said) or "another hash"


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
