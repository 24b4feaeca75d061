"""``files.json``: the files of a checkpoint and their sizes, so that a missing or truncated one is found by its name.

Sizes are compared and contents are not read, so that the check takes no time for a checkpoint of any size.
"""

from __future__ import annotations

import json
from pathlib import Path

from veomni_trainer.output.files import write_whole

MANIFEST = "files.json"


def write_manifest(checkpoint: Path) -> None:
    """List the files that are in ``checkpoint`` now."""
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in _files(checkpoint)}
    write_whole(checkpoint / MANIFEST, json.dumps(sizes, indent=1))


def damage(checkpoint: Path) -> list[str]:
    """What is wrong with the files of ``checkpoint``, e.g. ``optimizer.pt is missing``; empty if nothing is."""
    manifest = checkpoint / MANIFEST
    try:
        sizes = json.loads(manifest.read_text(encoding="utf-8"))
        listed = {str(name): int(size) for name, size in sizes.items()}
    except FileNotFoundError:
        return [f"{MANIFEST}, which lists its files, is missing"]
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return [f"{MANIFEST}, which lists its files, can't be read ({error})"]
    return [problem for name, size in listed.items() if (problem := _problem(checkpoint / name, name, size))]


def _problem(path: Path, name: str, size: int) -> str:
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return "" if found == size else f"{name} has {found:,} bytes instead of {size:,}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
