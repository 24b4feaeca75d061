"""Selects the tests of a command: ``make test``, ``make test-docs``, or a part of ``make test-all``.

``--suite all`` is pytest's own behaviour: what is named is run. ``--suite test`` leaves out the tests that are marked
``thorough`` or ``docs``; ``--suite docs`` runs those marked ``docs``. A mark with ``one_per`` keeps a sample in
``--suite test``: of the tests that have equal values of the named parameters, one runs. A stable hash of these values
chooses it, so that over many kernels all dtypes run, and each kernel always runs in the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

_PLACES = ("thorough", "docs")
# A file whose tests all have a mark without a sample is not imported.
_WHOLE_FILE = re.compile(r"^pytestmark = pytest\.mark\.(thorough|docs)(?:  #.*)?$", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suites", "test commands")
    group.addoption("--suite", choices=("test", "docs", "all"), default="all", help="the tests of which make target")
    group.addoption(
        "--part", metavar="K/N", type=_part, help="of N parts of the tests, which are equal in files, the Kth"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "thorough(one_per=None): runs in make test-all; make test runs one for each value of the parameters one_per",
        "docs(one_per=None): runs in make test-docs and make test-all; one_per as in thorough",
    ):
        config.addinivalue_line("markers", line)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    suite = config.getoption("suite")
    if suite == "all" or not collection_path.match("test_*.py"):
        return None
    marked = _WHOLE_FILE.search(collection_path.read_text(encoding="utf-8"))
    return True if marked and (suite == "test" or marked[1] == "thorough") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = select(items, config.getoption("suite"), config.getoption("part"))
    if len(selected) < len(items):
        kept = set(selected)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = selected


def select(items: Iterable[pytest.Item], suite: str, part: tuple[int, int] | None = None) -> list[pytest.Item]:
    """Those of ``items`` that ``suite`` runs, in ``part`` (which, of how many) of it."""
    items = list(items)
    if suite == "docs":
        items = [item for item in items if item.get_closest_marker("docs")]
    elif suite == "test":
        sampled = _sampled(items)
        items = [item for item in items if item in sampled or not any(map(item.get_closest_marker, _PLACES))]
    if part is not None:
        which, parts = part
        items = [item for item in items if _hash(item.nodeid.partition("::")[0]) % parts == which - 1]
    return items


def _sampled(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    groups: dict[tuple[str, ...], list[pytest.Item]] = {}
    numbers: dict[tuple[str, str], dict[int, int]] = {}
    for item in items:
        marks = [mark for place in _PLACES for mark in item.iter_markers(place)]
        if not marks or any(mark.kwargs.get("one_per") is None for mark in marks):
            continue
        names = marks[0].kwargs["one_per"]
        function = item.nodeid.partition("[")[0]
        texts = [_text(_parameter(item, name), numbers.setdefault((function, name), {})) for name in names]
        groups.setdefault((function, *texts), []).append(item)
    return {_chosen(group, members) for group, members in groups.items()}


def _parameter(item: pytest.Item, name: str) -> object:
    called = getattr(item, "callspec", None)
    if called is None or name not in called.params:
        raise pytest.UsageError(f"{item.nodeid} is marked one_per {name!r}, and has no parameter of this name")
    return called.params[name]


def _text(value: object, numbers: dict[int, int]) -> str:
    """``value`` as text that is the same in every process: if it has none, its number among the values."""
    text = str(value)
    return f"#{numbers.setdefault(id(value), len(numbers))}" if " at 0x" in text else text


def _chosen(group: tuple[str, ...], members: list[pytest.Item]) -> pytest.Item:
    """One of ``members`` that can run here, if there is any."""
    running = [item for item in members if not item.get_closest_marker("skip")] or members
    return sorted(running, key=lambda item: item.nodeid)[_hash("|".join(group)) % len(running)]


def _hash(text: str) -> int:
    """The same number in every process, unlike ``hash``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _part(text: str) -> tuple[int, int]:
    which, _, parts = text.partition("/")
    if not (which.isdigit() and parts.isdigit() and 1 <= int(which) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: write K/N with 1 <= K <= N, as 3/8")
    return int(which), int(parts)
