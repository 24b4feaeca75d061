"""The list of faults, as ``areas/*.yaml`` have it, and what is wrong with an entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
AREAS = Path(__file__).resolve().parent / "areas"
_KEYS = {"harm", "file", "old", "new", "near", "may_hang"}


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: what it is called, in words joined by hyphens.
        area: the file that lists it, without its suffix.
        harm: what goes wrong for a user, in a sentence.
        file: where it is planted, from the repository's root.
        old, new: the text that occurs once there, and what takes its place.
        near: the test files that most likely catch it.
        may_hang: whether tests that don't end count as a catch.
    """

    name: str
    area: str
    harm: str
    file: str
    old: str
    new: str
    near: tuple[str, ...]
    may_hang: bool = False

    def planted_in(self, text: str) -> str:
        """``text`` with the fault.

        Raises:
            ValueError: what the fault replaces is not there exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {count} times, expected once")
        return text.replace(self.old, self.new)

    def problems(self, root: Path = ROOT) -> Iterator[str]:
        """What is wrong with this entry of the list."""
        path = root / self.file
        if not path.is_file():
            yield f"{self.name}: there is no {self.file}"
            return
        text = path.read_text(encoding="utf-8")
        try:
            planted = self.planted_in(text)
        except ValueError as error:
            yield str(error)
        else:
            if planted == text:
                yield f"{self.name}: it changes nothing"
            elif path.suffix == ".py" and (why := _why_not_code(planted)):
                yield f"{self.name}: with it, {self.file} is no code ({why})"
        if not self.near or not self.harm.endswith("."):
            yield f"{self.name}: it needs `near`, and a `harm` that ends in a full stop"
        yield from (f"{self.name}: there is no {each}" for each in self.near if not (root / each).is_file())


def faults() -> list[Fault]:
    """All of them, area by area."""
    return [fault for path in sorted(AREAS.glob("*.yaml")) for fault in _in_area(path)]


def chosen(names: list[str], shard: tuple[int, int]) -> list[Fault]:
    """Those with one of ``names``, or all without names; of these, every ``shard[1]``-th from ``shard[0]`` on.

    Raises:
        ValueError: there is no fault of such a name.
    """
    known = {fault.name: fault for fault in faults()}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no fault {', '.join(unknown)}")
    return [known[name] for name in names or known][shard[0] - 1 :: shard[1]]


def _in_area(path: Path) -> Iterator[Fault]:
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if unknown := sorted(entry.keys() - _KEYS):
            raise ValueError(f"{path.name}, {name}: unknown keys {', '.join(unknown)}")
        yield Fault(**{**entry, "name": name, "area": path.stem, "near": tuple(entry["near"])})


def _why_not_code(text: str) -> str:
    try:
        compile(text, "planted", "exec", dont_inherit=True)
    except SyntaxError as error:
        return str(error)
    return ""
