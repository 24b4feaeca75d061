"""Writes a folder of safetensors files whose tensors never are in memory as a whole.

safetensors' own functions take whole tensors, and one tensor of all experts can be larger than the memory allowed.
Each file is synced and renamed when it is whole, so that a run that was killed goes on after the last whole file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from veomni_core.errors import ConfigError, HostError
from veomni_tools.checkpoints.conversion import Output
from veomni_tools.checkpoints.weight_files import MARK, itemsize
from veomni_transformers.whole_files import publish_folder, sync

_INDEX = "model.safetensors.index.json"
_PLAN = ".plan"


def write_folder(
    folder: Path, outputs: Iterable[Output], shard_bytes: int, layout: str, beside: Sequence[Path], source: str
) -> int:
    """Write ``outputs`` as files of ``shard_bytes`` at most, and copies of ``beside``; the folder appears as a whole.

    Args:
        folder: the folder, which must not exist. Until all is written, it is ``.NAME.partial`` beside it.
        outputs: the tensors. A tensor larger than ``shard_bytes`` has a file to itself.
        shard_bytes: the size that a file may have.
        layout: what the files' metadata say of the experts in them.
        beside: the other files of the folder.
        source: what the tensors are read from. Files of an earlier run are kept if it wrote the same from the same.

    Returns:
        How many files were written; those that were kept are not counted.

    Raises:
        ConfigError: ``folder`` exists.
        HostError: the disk has no room, a file can't be written, or another process is writing this folder.
    """
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists; name a folder that doesn't")
    folder = folder.absolute()
    staging = folder.with_name(f".{folder.name}.partial")
    shards = _sharded(list(outputs), shard_bytes)
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    facts = [source, layout, [[(each.name, each.dtype, each.shape) for each in shard] for shard in shards]]
    plan = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    try:
        staging.mkdir(parents=True, exist_ok=True)
        lock = staging.with_name(f"{staging.name}.lock")
        with FileLock(lock, timeout=0):
            written = _fill(staging, plan, dict(zip(names, shards, strict=True)), layout, beside)
            (staging / _PLAN).unlink()
            publish_folder(staging, folder)
            lock.unlink(missing_ok=True)
    except Timeout:
        raise HostError(f"another process is writing {folder}; wait for it, or name another folder") from None
    except OSError as error:
        kept = f" Its finished files are kept in {staging}: the same command goes on with the others"
        raise HostError(f"{folder} can't be written: {error}.{kept if staging.is_dir() else ''}") from error
    return written


def _fill(staging: Path, plan: str, shards: dict[str, list[Output]], layout: str, beside: Sequence[Path]) -> int:
    note = staging / _PLAN
    if not note.is_file() or note.read_text(encoding="utf-8") != plan:
        for path in staging.iterdir():
            path.unlink()
        note.write_text(plan, encoding="utf-8")
    left = {name: shard for name, shard in shards.items() if not (staging / name).exists()}
    _refuse_full_disk(staging, sum(each.nbytes for shard in left.values() for each in shard))
    for name, shard in left.items():
        _write_file(staging / name, shard, layout)
    index = {
        "metadata": {"total_size": sum(each.nbytes for shard in shards.values() for each in shard)},
        "weight_map": {each.name: name for name, shard in shards.items() for each in shard},
    }
    (staging / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for path in beside:
        shutil.copyfile(path, staging / path.name)  # a link of the Hub's cache becomes a file
    return len(left)


def _write_file(path: Path, outputs: Sequence[Output], layout: str) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt", MARK: layout}}
    at = 0
    for each in outputs:
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": (at, at + each.nbytes)}
        at += each.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for each in outputs:
            for part in each.parts():
                stream.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    sync(temporary)
    temporary.replace(path)


def _sharded(outputs: list[Output], limit: int) -> list[list[Output]]:
    """Tensors in order, as many in a file as fit; within a file those of wide dtypes first, so that all are aligned."""
    shards: list[list[Output]] = []
    size = 0
    for each in outputs:
        if not shards or size + each.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(each)
        size += each.nbytes
    return [sorted(shard, key=lambda each: -itemsize(each.dtype)) for shard in shards]


def _refuse_full_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise HostError(
            f"the weights take {needed:,} bytes, and the disk of {folder.parent} has {free:,} free. Free some, or name "
            "a folder on another disk"
        )
