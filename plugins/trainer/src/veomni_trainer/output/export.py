"""Writes a checkpoint as a plain folder of safetensors that ``from_pretrained`` loads, without loading the model."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path

from veomni_core.errors import CheckpointError, ConfigError
from veomni_trainer.output.files import publish_folder
from veomni_trainer.output.shards import is_sharded

_CONFIGS = ("config.json", "generation_config.json")


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the weights of ``checkpoint`` and their config to ``folder``, which appears whole or not at all.

    Shards are joined region by region from memory-mapped files, so no process holds the whole model.

    Raises:
        ConfigError: ``folder`` exists.
        CheckpointError: ``checkpoint`` holds no weights that can be exported, or they are damaged.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that doesn't, for the exported weights")
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        _write(checkpoint, staging)
        publish_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(checkpoint: Path, folder: Path) -> None:
    whole = [*checkpoint.glob("model*.safetensors"), *checkpoint.glob("model.safetensors.index.json")]
    if is_sharded(checkpoint):
        _join(checkpoint, folder)
    elif whole:
        for path in whole:
            shutil.copy2(path, folder / path.name)
    else:
        raise CheckpointError(
            f"{checkpoint} holds no weights that can be exported: neither model*.safetensors nor "
            "shard-*-model-*.safetensors (train.fsdp: true writes neither)"
        )
    for name in _CONFIGS:
        if (checkpoint / name).exists():
            shutil.copy2(checkpoint / name, folder / name)


def _join(checkpoint: Path, folder: Path) -> None:
    from transformers.distributed.checkpoint import consolidate_distributed_checkpoint

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            consolidate_distributed_checkpoint(checkpoint, folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint}: its shards can't be joined: {error}") from error
