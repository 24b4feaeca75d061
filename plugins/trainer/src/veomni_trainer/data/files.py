"""Finds the files that a source names, in the same order on every machine, and says of what format each is."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from veomni_core.errors import JobFileError
from veomni_trainer.data.reading import Reading
from veomni_trainer.job.data_section import STDLIB
from veomni_trainer.job.source_keys import Source
from veomni_transformers.jobs.hub_snapshots import is_hub_id, nearest, pinned

TEXT, DATASET, HUB = "text", "dataset", "hub"
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_FORMATS = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv"},
    **{".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"},
}
_NEITHER_TEXT_NOR_TABLE = {
    **dict.fromkeys((".7z", ".rar", ".tar", ".tgz", ".xz", ".zip"), "an archive"),
    **dict.fromkeys((".ckpt", ".gguf", ".pt", ".pth", ".safetensors"), "a checkpoint"),
    **dict.fromkeys((".h5", ".npy", ".npz"), "an array file"),
    **dict.fromkeys((".pickle", ".pkl"), "a pickle"),
    **dict.fromkeys((".docx", ".pdf", ".xlsx"), "an office document"),
    **dict.fromkeys((".db", ".sqlite"), "a database"),
}
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_SAVED_DATASET = ({"dataset_dict.json"}, {"dataset_info.json", "state.json"})  # what save_to_disk writes


@dataclass(frozen=True)
class FoundFile:
    """A file to read, a folder that ``save_to_disk`` wrote, or a data set of the Hub.

    Attributes:
        path: where it is; of the Hub, the id at a commit.
        entry: what the job names: this file, or a folder or glob that it was found by.
        named: whether the job names it itself. Then it must be readable; others are left out if they hold no text.
        format: one of the job's formats, or ``None`` if its suffix names something else.
        separator: the character between two values that a data set of the Hub states.
    """

    path: Path
    entry: str
    named: bool
    format: str | None
    separator: str | None = None


def find_files(source: Source, reading: Reading) -> list[FoundFile]:
    """Every file of the source, each once; counts in ``reading`` those that are named twice.

    Raises:
        JobFileError: a path doesn't exist, or nothing matches.
        HostError: neither the Hub nor its cache has a data set.
    """
    found: dict[Path, FoundFile] = {}
    for entry in [source.files] if isinstance(source.files, str) else source.files:
        if is_hub_id(entry):
            path = Path(pinned(reading.key, entry, source.revision, kind="dataset"))
            found[path] = FoundFile(path, entry, True, HUB)
            continue
        path = Path(entry)
        named = path.is_file() or is_saved_dataset(path)
        for each in [path] if named else _search(entry, source.pattern, reading):
            if not named and _is_hidden(each, path):
                reading.skip_file(each, "hidden")
            elif each.resolve() in found:
                reading.skip_file(each, "named twice")
            else:
                found[each.resolve()] = FoundFile(each, entry, named, source.format or format_of(each))
    if not found:
        raise JobFileError(f"{reading.key} names no file")
    return [*found.values()]


def format_of(path: Path) -> str | None:
    """The format that a path's suffix names, e.g. ``jsonl`` for ``a.jsonl.gz``; by default ``text``.

    ``None`` if the suffix names something that is neither text nor a table; :func:`other_kind` says what.
    """
    if path.is_dir():
        return DATASET
    return None if other_kind(path) else _FORMATS.get(_suffix(path), TEXT)


def other_kind(path: Path) -> str | None:
    """What a file is that is neither text nor a table, e.g. ``an archive``, by its suffix."""
    return _NEITHER_TEXT_NOR_TABLE.get(_suffix(path))


def is_saved_dataset(path: Path) -> bool:
    """Whether ``path`` is a folder that ``datasets``' ``save_to_disk`` wrote."""
    return any(all((path / name).is_file() for name in names) for names in _SAVED_DATASET)


def _suffix(path: Path) -> str:
    """The last suffix, but that of compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _search(entry: str, pattern: str, reading: Reading) -> list[Path]:
    if entry == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in root.glob("**/*.py") if not _NOT_STDLIB & {*p.relative_to(root).parts}]
        return sorted(paths, key=lambda path: path.relative_to(root).as_posix())
    if Path(entry).is_dir():
        found = sorted(Path(entry).glob(pattern), key=Path.as_posix)
        paths = [path for path in found if path.is_file()]
        linked = [path for path in Path(entry).rglob("*") if path.is_symlink() and path.is_dir()]
        for each in linked if "**" in pattern else ():  # which may lead back up
            reading.skip_file(each, "linked folders: name them in data.files too")
        _leave_out_broken(found, reading)
        if not paths:
            also = f"; folders that are linked, as {linked[0]}, must be named in data.files" if linked else ""
            raise JobFileError(f"{reading.key}: no file in {entry} matches data.pattern {pattern!r}{also}")
        return [*dict.fromkeys(_with_datasets_whole(paths, Path(entry)))]
    if glob.has_magic(entry):
        found = sorted(map(Path, glob.iglob(entry, recursive=True)), key=Path.as_posix)
        paths = [path for path in found if path.is_file() or is_saved_dataset(path)]
        _leave_out_broken(found, reading)
        if not paths:
            raise JobFileError(f"{reading.key}: no file matches {entry!r}")
        return paths
    raise JobFileError(f"{reading.key}: there is no file or folder {entry}.{nearest(Path(entry), STDLIB)}")


def _leave_out_broken(paths: list[Path], reading: Reading) -> None:
    for path in paths:
        if path.is_symlink() and not path.exists():
            reading.skip_file(path, "broken links")


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether ``path`` lies in a hidden folder of ``folder``, or is hidden: editors keep copies there."""
    below = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
    return any(part.startswith(".") for part in below)


def _with_datasets_whole(paths: list[Path], root: Path) -> Iterator[Path]:
    """The paths; in place of the files in a saved dataset, its folder."""
    saved: dict[Path, Path | None] = {root: None}

    def dataset_around(folder: Path) -> Path | None:
        if folder not in saved:
            saved[folder] = dataset_around(folder.parent) or (folder if is_saved_dataset(folder) else None)
        return saved[folder]

    for path in paths:
        yield dataset_around(path.parent) or path
