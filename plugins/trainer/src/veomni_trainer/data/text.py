"""Finds and reads the documents that a job names, in an order that is the same on every machine."""

from __future__ import annotations

import difflib
import glob
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from veomni_core.errors import JobFileError
from veomni_trainer.job.data_section import STDLIB

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass
class Reading:
    """Counts the files that were read and, by reason, those that were skipped."""

    documents: int = 0
    skipped: dict[str, list[Path]] = field(default_factory=dict)

    def describe(self) -> str:
        """``674 files; left out: 2 not UTF-8 text (a.bin, ...), 1 empty (b.txt)``."""
        left_out = [f"{len(paths)} {reason} ({_some(paths)})" for reason, paths in self.skipped.items()]
        return f"{self.documents} files" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def read_documents(files: str | list[str], pattern: str, reading: Reading) -> Iterator[bytes]:
    """Yield the UTF-8 bytes of every document; counts files in ``reading``.

    A file that is named itself must exist and be text. Other files in a folder, or matched by a glob, are skipped and
    counted if they aren't text.

    Raises:
        JobFileError: a path doesn't exist, nothing matches, or a named file is empty or isn't text.
    """
    seen: set[Path] = set()
    for entry in [files] if isinstance(files, str) else files:
        named = Path(entry).is_file()
        before = reading.documents
        for path in [Path(entry)] if named else _search(entry, pattern):
            if path.resolve() in seen:
                reading.skipped.setdefault("named twice", []).append(path)
                continue
            seen.add(path.resolve())
            data, problem = _read(path)
            if problem is None:
                reading.documents += 1
                yield data
            elif named:
                raise JobFileError(f"data.files: {path} is {problem}")
            else:
                reading.skipped.setdefault(problem.partition(":")[0], []).append(path)
        if not named and reading.documents == before:
            raise JobFileError(f"data.files: {entry} holds no text: {reading.describe()}")
    if not reading.documents:
        raise JobFileError("data.files names no file")


def _search(entry: str, pattern: str) -> list[Path]:
    if entry == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in root.glob("**/*.py") if not _NOT_STDLIB & {*p.relative_to(root).parts}]
        return sorted(paths, key=lambda path: path.relative_to(root).as_posix())
    if Path(entry).is_dir():
        paths = sorted((p for p in Path(entry).glob(pattern) if p.is_file()), key=Path.as_posix)
        if not paths:
            raise JobFileError(f"data.files: no file in {entry} matches data.pattern {pattern!r}")
        return paths
    if glob.has_magic(entry):
        paths = sorted((p for p in map(Path, glob.iglob(entry, recursive=True)) if p.is_file()), key=Path.as_posix)
        if not paths:
            raise JobFileError(f"data.files: no file matches {entry!r}")
        return paths
    raise JobFileError(f"data.files: there is no file or folder {entry}.{_nearest(Path(entry))}")


def _read(path: Path) -> tuple[bytes, str | None]:
    """The file's bytes, and ``None`` or why they are no document.

    The part of the reason before a colon is the same for all such files, and serves to count them.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return b"", f"unreadable: {error.strerror}"
    if not data:
        return b"", "empty"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return b"", f"not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}"
    if b"\0" in data:
        return b"", f"not UTF-8 text: a zero byte at offset {data.index(0)}"
    return data, None


def _nearest(path: Path) -> str:
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, [*siblings, STDLIB], n=1, cutoff=0.7)
    return f" Did you mean {close[0]!r}?" if close else ""


def _some(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
