"""The plugins that installed distributions declare, read from their metadata alone. Imports none of them.

``importlib.metadata.entry_points`` raises if one distribution's metadata is damaged, whoever it belongs to. Here such a
distribution is one entry with a problem, and the others are found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

from veomni_core.descriptions.hookspecs import DEFINITIONS_GROUP, ENTRY_POINT_GROUP

UNKNOWN = "unknown"
_FILE = "entry_points.txt"
# As every packager writes them. Parsing the metadata of 150 distributions, READMEs included, took 70 ms of each call.
_FIRST_HEADERS = re.compile(r"Metadata-Version: \S+\nName: (?P<name>\S+)\nVersion: (?P<version>\S+)\n(?![ \t])")
_GROUPS = (ENTRY_POINT_GROUP, DEFINITIONS_GROUP)
_OUR_GROUP = re.compile(rf"^\s*\[({'|'.join(map(re.escape, _GROUPS))})\]\s*$", re.MULTILINE)
_REINSTALL = "uninstall it, or install it again"


@dataclass(frozen=True)
class InstalledPlugin:
    """One entry point of a distribution, not imported.

    Attributes:
        name: the entry point's name.
        distribution, version: what installed it; ``unknown`` and ``?`` where its metadata doesn't say.
        module: the module that it names.
        metadata: the distribution, for its files.
        problem: what is wrong with the metadata; empty if nothing is.
        defines: whether the entry point is in the group ``veomni.definitions``.
    """

    name: str
    distribution: str
    version: str
    module: str
    metadata: Distribution
    problem: str = ""
    defines: bool = False


def installed_plugins() -> list[InstalledPlugin]:
    """Every plugin that a distribution on ``sys.path`` declares, sorted by name and distribution.

    Of two distributions of one name, the one that comes first on the path counts.
    """
    found: list[InstalledPlugin] = []
    seen: set[str] = set()
    for metadata in distributions():
        name, version, problem = identity(metadata)
        key = re.sub(r"[-_.]+", "-", name).lower()
        if name == UNKNOWN or key not in seen:
            found += _declared(metadata, name, version, problem)
        seen.add(key)
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def definition_distributions() -> list[str]:
    """The distributions that define what ops are and where; their versions decide what a plan finds and proves."""
    return sorted({plugin.distribution for plugin in installed_plugins() if plugin.defines})


def _read(metadata: Distribution, name: str) -> str | None:
    """What a file of the metadata says, read again only where the file is another: there are hundreds."""
    path = getattr(metadata, "_path", None)  # Python's own finder has it, and no public name for it
    file = f"{path}{os.sep}{name}" if isinstance(path, Path) else ""  # of which there is no stat
    try:
        found = os.stat(file)
        return _text(file, found.st_ino, found.st_mtime_ns, found.st_size)
    except OSError:
        return metadata.read_text(name)


@lru_cache(maxsize=4096)
def _text(file: str, *state: int) -> str:
    return Path(file).read_text(encoding="utf-8")


def identity(metadata: Distribution) -> tuple[str, str, str]:
    """Name and version of a distribution, and what is wrong with its METADATA."""
    try:
        text = _read(metadata, "METADATA")
        if text and (first := _FIRST_HEADERS.match(text)):
            return first["name"], first["version"], ""
        described = metadata.metadata
        name, version = described["Name"], described["Version"]
    except Exception as error:  # no UTF-8, or whatever the version of Python raises of a file that is missing
        return UNKNOWN, "?", f"its METADATA can't be read ({type(error).__name__}: {error}); {_REINSTALL}"
    absent = " and no ".join(key for key, value in (("Name", name), ("Version", version)) if not value)
    return name or UNKNOWN, version or "?", f"its METADATA has no {absent}; {_REINSTALL}" if absent else ""


def _declared(metadata: Distribution, name: str, version: str, problem: str) -> Iterator[InstalledPlugin]:
    try:
        text = _read(metadata, _FILE) or ""
        if not any(group in text for group in _GROUPS):
            return  # as nearly all: parsing what the others declare took 20 ms
        points: list[EntryPoint] = [point for point in metadata.entry_points if point.group in _GROUPS]
    except Exception as error:  # a line without "=", no UTF-8, ...
        if _may_be_ours(metadata):
            why = f"its {_FILE} can't be read ({type(error).__name__}: {error}); {_REINSTALL}"
            yield InstalledPlugin(name, name, version, UNKNOWN, metadata, why)
        return
    for point in points:
        defines = point.group == DEFINITIONS_GROUP
        yield InstalledPlugin(point.name, name, version, point.value, metadata, problem, defines)


def _may_be_ours(metadata: Distribution) -> bool:
    """Whether a file of entry points that can't be read declares plugins; who can't tell takes it for one that does."""
    try:
        return bool(_OUR_GROUP.search(metadata.read_text(_FILE) or ""))
    except ValueError:  # no UTF-8
        return True
