"""Compares generated files with what would be generated now, and says what moved upstream under which patch."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from veomni_core.errors import ConfigError
from veomni_patchgen.config import Patch, PatchConfig
from veomni_patchgen.generation import Generated
from veomni_patchgen.layout import formatted
from veomni_patchgen.source import Source, inherited_code, inherited_method
from veomni_transformers.generated_modeling import record_of

_SHOWN = 8  # lines of code that is gone
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def drifted(generated: Generated, folder: Path) -> list[str]:
    """How the files in ``folder`` differ from ``generated``, a line for each difference; empty if they don't.

    A file that was formatted otherwise is no different.
    """
    file = folder / generated.config.target_file
    if not file.is_file():
        return [f"{file} is missing"]
    text = _read(file)
    beside = file.with_suffix(".diff")
    if _laid_out(text) == _laid_out(generated.text):
        stale = not beside.is_file() or _read(beside) != generated.diff
        return [f"{beside} is missing or old"] if stale else []
    try:
        record = record_of(file)
    except ConfigError as error:
        return [str(error)]
    said = moved(generated.config, generated.source, file) or _edits(text, generated)
    if said == [_changed(generated.source, record)]:
        said.append("none of it is under a patch")
    return [f"{file}: {line}" for line in said]


def moved(config: PatchConfig, source: Source, file: Path) -> list[str]:
    """What has changed upstream since ``file`` was generated, under which patch; empty if nothing has.

    Raises:
        ConfigError: ``file`` was not generated.
    """
    record, patches = record_of(file), {each.target: each for each in config.all_patches()}
    found = [
        f"{where} has changed under {patches[target].title}"
        for target, (where, digest) in inherited_code(patches.values(), source).items()
        if record.get("inherited", {}).get(target, (where, digest))[1] != digest
    ]
    if record["sha256"] == source.digest:
        return found
    found.insert(0, _changed(source, record))
    beside = file.with_suffix(".diff")
    text, _ = formatted(_read(file))
    text = upstream_before(text, _read(beside) if beside.is_file() else "") or ""
    before = Source(source.name, text)
    if before.digest != record["sha256"]:
        return [*found, f"which lines can't be said, since {beside.name} doesn't belong to {file.name}"]
    return [*found, *(line for each in patches.values() for line in moved_lines(each, before, source))]


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")  # what isn't text was edited


def _laid_out(text: str) -> str:
    with suppress(RuntimeError):  # it was edited, and is no Python
        return formatted(text, "format.skip-magic-trailing-comma=true")[0]  # which shorter lines have brought
    return text


def _changed(source: Source, record: Mapping[str, Any]) -> str:
    return f"{source.name} has changed since {record['version'] or 'then'}"


def moved_lines(patch: Patch, before: Source, now: Source) -> list[str]:
    """What changed in upstream's code that ``patch`` changes: its lines now, and the code then and now."""
    old, new = _target(before, patch.target), _target(now, patch.target)
    if old is None or old == new:
        return []
    start, then = old
    if new is None:
        gone = [f"-{line}" for line in then[:_SHOWN]] + ["..."] * (len(then) > _SHOWN)
        what = f"upstream's {_lines(start, len(then))} of then are gone under {patch.title}"
        return ["\n  ".join([what, *gone])]
    start, here = new
    found = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, then, here, autojunk=False).get_opcodes():
        if tag != "equal":
            changed = [f"-{line}" for line in then[i1:i2]] + [f"+{line}" for line in here[j1:j2]]
            what = f"upstream's {_lines(start + j1, j2 - j1)} moved under {patch.title}"
            found.append("\n  ".join([what, *changed]))
    return found


def _lines(start: int, count: int) -> str:
    return f"line {start}" if count < 2 else f"lines {start} to {start + count - 1}"


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


def _target(source: Source, target: str) -> tuple[int, list[str]] | None:
    """The first line and the lines of a class, a function or a method, be it inherited."""
    owner, _, method = target.partition(".")
    if method and (found := inherited_method(owner, method, source)):
        source, target = found[0], f"{found[1].name.value}.{method}"
    body: Any = ast.parse(source.text).body
    node = None
    for name in target.split("."):
        node = next((each for each in body if getattr(each, "name", None) == name), None)
        body = getattr(node, "body", ())
    if node is None:
        return None
    start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return start, source.text.splitlines()[start - 1 : node.end_lineno]


def _edits(text: str, generated: Generated) -> list[str]:
    changes = difflib.unified_diff(
        text.splitlines(), generated.text.splitlines(), "the file", "generated now", lineterm="", n=0
    )
    return ["it was edited by hand, or its patches or upstream's version have changed:\n  "
            + "\n  ".join([*changes][2:22])]  # fmt: skip
