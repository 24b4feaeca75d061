"""Whether a run's folder can be written, how much room its disk has, and what a failed write was about."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from safetensors import SafetensorError

from veomni_core.errors import ConfigError

_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ENOTDIR)
_SIGNS = ("PytorchStreamWriter", "No space left", "unexpected pos")  # torch raises RuntimeError where it can't write


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
    """Why a write failed, if ``error`` says that one did; otherwise nothing.

    Python raises ``OSError`` for that, safetensors an error of its own, and torch a ``RuntimeError``.
    """
    if isinstance(error, OSError):
        return str(error) if error.errno is None or error.errno in _ERRNOS else ""
    if isinstance(error, SafetensorError) or (isinstance(error, RuntimeError) and any(s in str(error) for s in _SIGNS)):
        return str(error).splitlines()[0]
    return ""
