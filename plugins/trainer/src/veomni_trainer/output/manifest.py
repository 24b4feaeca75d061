"""``files.json``: the files of a checkpoint with sizes and checksums, so that a damaged one is found by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from veomni_transformers.whole_files import write_whole

MANIFEST = "files.json"
_THREADS = 4  # hashing is as fast as one disk, and files may lie on several
_BLOCK = 2**24


def write_manifest(checkpoint: Path) -> None:
    """List the files that are in ``checkpoint`` now."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums = list(pool.map(_checksum, paths))
    entries = {
        path.relative_to(checkpoint).as_posix(): (path.stat().st_size, checksum)
        for path, checksum in zip(paths, checksums, strict=True)
    }
    write_whole(checkpoint / MANIFEST, json.dumps(entries, indent=1))


def damage(checkpoint: Path, reads: bool = True, on_read: Callable[[int], None] = lambda count: None) -> list[str]:
    """What is wrong with the files of ``checkpoint``, e.g. ``optimizer.pt is missing``; empty if nothing is.

    Args:
        checkpoint: its folder.
        reads: whether every byte is compared with its checksum, and not just sizes.
        on_read: is called with the number of bytes of each block that was read.
    """
    manifest = checkpoint / MANIFEST
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))
        listed = {str(name): (int(size), str(digest)) for name, (size, digest) in entries.items()}
    except FileNotFoundError:
        return [f"{MANIFEST}, which lists its files, is missing"]
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return [f"{MANIFEST}, which lists its files, can't be read ({error})"]

    def problem(name: str) -> str:
        path, (size, digest) = checkpoint / name, listed[name]
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
        changed = reads and _checksum(path, on_read) != digest
        return f"{name} has other bytes than were written" if changed else ""

    with ThreadPoolExecutor(_THREADS) as pool:
        return [found for found in pool.map(problem, listed) if found]


def total_bytes(checkpoint: Path) -> int:
    """The size of all files in ``checkpoint``."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def _checksum(path: Path, on_read: Callable[[int], None] = lambda count: None) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()
