"""Compares generated files with what would be generated now, and says what moved upstream under which patch."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from veomni_core.errors import ConfigError
from veomni_patchgen.config import Patch
from veomni_patchgen.generation import Generated
from veomni_patchgen.layout import formatted
from veomni_patchgen.source import Source
from veomni_transformers.generated_modeling import record_of

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def drifted(generated: Generated, folder: Path) -> list[str]:
    """How the files in ``folder`` differ from ``generated``, a line for each difference; empty if they don't.

    A file that was formatted otherwise is no different.
    """
    file = folder / generated.config.target_file
    if not file.is_file():
        return [f"{file} is missing"]
    text = file.read_text(encoding="utf-8")
    beside = file.with_suffix(".diff")
    if formatted(text)[0] == generated.text:
        stale = not beside.is_file() or beside.read_text(encoding="utf-8") != generated.diff
        return [f"{beside} is missing or old"] if stale else []
    try:
        record = record_of(file)
    except ConfigError as error:
        return [str(error)]
    if record["sha256"] == generated.source.digest:
        return [f"{file}: {line}" for line in _edits(text, generated.text)]
    moved = f"{file}: {generated.source.name} has changed since {record['version'] or 'then'}"
    before = upstream_before(text, beside.read_text(encoding="utf-8") if beside.is_file() else "")
    if before is None or Source("", before).digest != record["sha256"]:
        return [f"{moved}; which lines can't be said, since {beside.name} doesn't belong to {file.name}"]
    under = [f"{file}: {line}" for each in generated.config.all_patches()
             for line in moved_lines(each, before, generated.source.text)]  # fmt: skip
    return [moved, *(under or [f"{file}: none of it is under a patch"])]


def moved_lines(patch: Patch, before: str, now: str) -> list[str]:
    """What changed in upstream's code that ``patch`` changes: its lines now, and the code then and now."""
    old, new = _target(before, patch.target), _target(now, patch.target)
    if old is None or new is None:
        return (
            []
            if old is new
            else [
                f"{patch.title}: upstream {'has' if old is None else 'had'} it only {'now' if old is None else 'then'}"
            ]
        )
    (_, then), (start, here) = old, new
    if then == here:
        return []
    found = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, then, here, autojunk=False).get_opcodes():
        if tag != "equal":
            lines = f"line {start + j1}" if j2 - j1 < 2 else f"lines {start + j1} to {start + j2 - 1}"
            changed = [f"-{line}" for line in then[i1:i2]] + [f"+{line}" for line in here[j1:j2]]
            found.append("\n  ".join([f"upstream's {lines} moved under {patch.title}", *changed]))
    return found


def upstream_before(text: str, diff: str) -> str | None:
    """The file that ``text`` was generated from, by the difference beside it; ``None`` if they don't fit."""
    lines, out, at = text.splitlines(keepends=True), [], 0
    for start, hunk in _hunks(diff):
        out += lines[at:start]
        at = start
        for line in hunk:
            if line[0] in " +":
                if at >= len(lines) or lines[at] != line[1:]:
                    return None
                at += 1
            if line[0] in " -":
                out.append(line[1:])
    return "".join([*out, *lines[at:]]) if diff else None


def _hunks(diff: str) -> Iterator[tuple[int, list[str]]]:
    start, hunk = 0, list[str]()
    for line in diff.splitlines(keepends=True):
        if match := _HUNK.match(line):
            if hunk:
                yield start, hunk
            start, hunk = int(match[3]) - (match[4] != "0"), []
        elif not line.startswith(("---", "+++")) or hunk:
            hunk.append(line)
    if hunk:
        yield start, hunk


def _target(text: str, target: str) -> tuple[int, list[str]] | None:
    """The first line and the lines of a class, a function or a method."""
    body: Any = ast.parse(text).body
    found = None
    for name in target.split("."):
        found = next((each for each in body if getattr(each, "name", None) == name), None)
        body = getattr(found, "body", ())
    if found is None:
        return None
    start = min([found.lineno, *(each.lineno for each in found.decorator_list)])
    return start, text.splitlines()[start - 1 : found.end_lineno]


def _edits(text: str, now: str) -> list[str]:
    lines = list(
        difflib.unified_diff(text.splitlines(), now.splitlines(), "the file", "generated now", lineterm="", n=0)
    )
    return ["it was edited by hand, or its patches have changed:\n  " + "\n  ".join(lines[2:22])]
