"""Writes files and folders atomically: a reader finds either nothing new or the complete content."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the content of ``path`` with ``text`` atomically: a reader finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def publish_folder(folder: Path, place: Path) -> None:
    """Move a finished folder to ``place`` atomically, after syncing its files to the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync(path)
    folder.replace(place)
    sync(place.parent)


def sync(path: Path) -> None:
    """Wait until the file or folder ``path`` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
