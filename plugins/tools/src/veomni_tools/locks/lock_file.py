"""``veomni.lock``: what was installed, what it described, and what jobs would run, as text of which a diff can be read.

The same content is the same text, byte for byte. The text begins with its own hash, so a file that was damaged, edited
or merged by hand is refused before anything in it is believed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from veomni_core.cli.frozen import LOCK_FILE
from veomni_core.errors import JobFileError, LockFileError
from veomni_core.jobs.jobfile import parse_yaml

FORMAT = 1
_ABOUT = "# What this run may rely on. Written by `veomni lock`, which alone can change it.\n"
_HASH = re.compile(r"# format ([0-9]+), sha256 of what follows: ([0-9a-f]{64})\n")
_SHOWN = 16  # digits of a hash that only tells which part changed: the whole is compared by all 64

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LockedPlugin:
    """One plugin of a distribution.

    Attributes:
        module: the module that its entry point names.
        specs: the beginning of the hash of each spec, by kind and name.
        specs_sha256: the hash of all of them; empty if the plugin was blocked, or failed, when it was locked.
    """

    module: str
    specs: Mapping[str, str] = field(default_factory=dict)
    specs_sha256: str = ""


@dataclass(frozen=True)
class LockedDistribution:
    """One installed distribution.

    Attributes:
        version: its version.
        files: the beginning of the hash of each file, by its path as an import names it.
        sha256: the hash of all of them.
        plugins: its plugins, by the names of their entry points.
    """

    version: str
    files: Mapping[str, str]
    sha256: str
    plugins: Mapping[str, LockedPlugin]


@dataclass(frozen=True)
class LockedPlan:
    """What one job runs on one kind of hardware.

    Attributes:
        sha256: the plan's hash.
        conditions: under what it was made: ``autocast to bfloat16``, for example.
        sites: what runs at each site, by ``op/variant`` and path.
        kernels: where each kernel comes from.
    """

    sha256: str
    conditions: str
    sites: Mapping[str, Mapping[str, str]]
    kernels: Mapping[str, str]


@dataclass(frozen=True)
class Lock:
    """A lock file's content.

    Attributes:
        distributions: those with plugins, and veomni-core, by name.
        jobs: the plans of each job, by its path from the lock file's folder, and by hardware.
        path: where it was read, for messages.
    """

    distributions: Mapping[str, LockedDistribution]
    jobs: Mapping[str, Mapping[str, LockedPlan]] = field(default_factory=dict)
    path: Path = Path(LOCK_FILE)

    def to_text(self) -> str:
        """The file's text."""
        data = {
            "distributions": {name: _distribution_data(each) for name, each in self.distributions.items()},
            "jobs": {job: {name: dict(vars(plan)) for name, plan in plans.items()} for job, plans in self.jobs.items()},
        }
        body = yaml.safe_dump(data, sort_keys=True, default_flow_style=False, width=10_000)
        return f"{_ABOUT}# format {FORMAT}, sha256 of what follows: {_sha256(body)}\n{body}"


def shortened(hashes: Mapping[str, str]) -> dict[str, str]:
    """The beginning of each hash: enough to tell which part changed."""
    return {name: each[:_SHOWN] for name, each in hashes.items()}


def read_lock(path: Path) -> Lock:
    """The lock in the file ``path``.

    Raises:
        LockFileError: there is none, it can't be read, it was damaged or edited, or another version wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LockFileError(f"{path}: there is no such lock file. `veomni lock` writes one") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no path
        raise LockFileError(f"{str(path)!r} can't be read as text ({error}). Restore it") from None
    return parse_lock(text, path)


@functools.lru_cache(maxsize=4)  # one command finds its plugins several times
def parse_lock(text: str, path: Path) -> Lock:
    """The lock that :meth:`Lock.to_text` wrote as ``text``.

    Raises:
        LockFileError: it is not such a text.
    """
    head = _HASH.match(text, len(_ABOUT)) if text.startswith(_ABOUT) else None
    if head is None:
        raise LockFileError(f"{path} is no lock file: its first lines are not those that `veomni lock` writes")
    if head[1] != str(FORMAT):
        raise LockFileError(
            f"{path} has format {head[1]}, and this veomni-core reads format {FORMAT}: use the version that wrote it, "
            "or write it again with `veomni lock`"
        )
    body = text[head.end() :]
    if _sha256(body) != head[2]:
        raise LockFileError(
            f"{path} was damaged, edited, or merged: its hash is not that of its content. Restore it, or write it "
            "again with `veomni lock`"
        )
    try:
        data = parse_yaml(body, str(path))
        jobs = _each(data["jobs"], lambda plans: _each(plans, _plan_of))
        return Lock(_each(data["distributions"], _distribution_of), jobs, path)
    except (JobFileError, KeyError, TypeError) as error:
        raise LockFileError(f"{path} is no lock file ({error}). Write it again with `veomni lock`") from None


def _distribution_data(locked: LockedDistribution) -> dict[str, Any]:
    plugins = {name: dict(vars(plugin)) for name, plugin in locked.plugins.items()}
    return {**vars(locked), "plugins": plugins}


def _distribution_of(data: Any) -> LockedDistribution:
    return LockedDistribution(
        version=_text(data["version"]),
        files=_each(data["files"], _text),
        sha256=_text(data["sha256"]),
        plugins=_each(data["plugins"], _plugin_of),
    )


def _plugin_of(data: Any) -> LockedPlugin:
    return LockedPlugin(_text(data["module"]), _each(data["specs"], _text), _text(data["specs_sha256"]))


def _plan_of(data: Any) -> LockedPlan:
    return LockedPlan(
        sha256=_text(data["sha256"]),
        conditions=_text(data["conditions"]),
        sites=_each(data["sites"], lambda paths: _each(paths, _text)),
        kernels=_each(data["kernels"], _text),
    )


def _each(data: Any, make: Callable[[Any], _Value]) -> dict[str, _Value]:
    if not isinstance(data, dict):
        raise TypeError(f"{data!r} is no mapping")
    return {_text(name): make(value) for name, value in data.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
