"""Whether a run's folder can be written, how much room its disk has, and what a failed write was about."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from veomni_core.errors import ConfigError, HostError, VeOmniError
from veomni_trainer.job.train_section import TrainSection

_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ENOTDIR)
# Of torch, which raises RuntimeError or its CheckpointException; and of tokenizers, which raises a bare Exception.
_SIGNS = ("PytorchStreamWriter", "No space left", "unexpected pos", "(os error ")


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists.

    Raises:
        ConfigError: the path leads through a file.
    """
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir():
        what = "is a file" if nearest == path else f"leads through the file {nearest}"
        raise ConfigError(f"train.output_dir: {path} {what}; name a folder")
    return nearest


def free_bytes(path: Path) -> int:
    """The free bytes of the disk on which ``path`` is, or would be."""
    return shutil.disk_usage(existing(path)).free


def write_failure(error: BaseException) -> str:
    """Why a write failed, if ``error`` says that one did; otherwise nothing."""
    if isinstance(error, OSError):
        return str(error) if error.errno is None or error.errno in _ERRNOS else ""
    from veomni_trainer.output.shards import reason  # imports transformers

    said = reason(error)
    is_write = isinstance(error, SafetensorError) or any(sign in said for sign in _SIGNS)
    return said if is_write and not isinstance(error, VeOmniError) else ""


@contextmanager
def naming_failed_writes(path: Path) -> Iterator[None]:
    """Name ``path``, which is made of a run's checkpoints, where it can't be written.

    Raises:
        HostError: it could not be written.
    """
    try:
        yield
    except Exception as error:
        if not (why := write_failure(error)):
            raise
        raise HostError(
            f"{path} can't be written: {why}. Its disk has {free_bytes(path.parent):,} bytes free. The checkpoints of "
            "the run are whole; when there is room, the same command (veomni train with --resume) writes the rest"
        ) from error


def checkpoint_bytes(model: nn.Module) -> int:
    """About how large a checkpoint is: the weights, and two states of the optimizer for each that is trained.

    Of an adapter it holds the trained weights alone.
    """
    frozen = 0 if hasattr(model, "peft_config") else 1
    return sum(p.numel() * p.element_size() * (3 if p.requires_grad else frozen) for p in model.parameters())


def check_disk_space(train: TrainSection, folder: Path, model: nn.Module) -> None:
    """Raise HostError if the job writes checkpoints, and the disk has no room for one."""
    needed, free = checkpoint_bytes(model), free_bytes(folder)
    if train.save_every != "never" and free < needed:
        raise HostError(
            f"train.output_dir: {describe_disk_space(folder, needed, free)}. Free some, or name another folder"
        )


def describe_disk_space(folder: Path, needed: int, free: int) -> str:
    """``a checkpoint takes about 1,200 bytes, and the disk of runs/first has 800 free``."""
    return f"a checkpoint takes about {needed:,} bytes, and the disk of {folder} has {free:,} free"
