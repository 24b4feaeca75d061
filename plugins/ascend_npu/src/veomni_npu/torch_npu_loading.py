"""Imports torch_npu; if that fails, the error says what is wrong. Importing this module doesn't import torch.

``import torch`` automatically loads an installed torch_npu. If torch_npu fails to load, ``import torch`` fails too,
with a message that names no cause. So this module imports torch with autoload turned off, and then torch_npu.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.version import Version

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class TorchNpuError(ImportError):
    """torch_npu is installed but can't be loaded; the message says why and what to do."""


def load_torch_npu() -> Any:
    """Import torch_npu and return the module, or ``None`` if it is not installed.

    Raises:
        TorchNpuError: torch_npu is built for another version of torch, CANN is missing, or the import failed otherwise.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return None
    _check_torch_version()
    try:
        with _without_autoload():
            importlib.import_module("torch")
            return importlib.import_module("torch_npu")
    except Exception as error:  # an import may raise anything; report it
        raise TorchNpuError(_explained(error)) from error


def _check_torch_version() -> None:
    """Raise unless torch and torch_npu have the same release number: torch_npu is built for exactly that torch."""
    torch_version, own_version = (importlib.metadata.version(name) for name in ("torch", "torch-npu"))
    if Version(torch_version).release[:3] != (release := Version(own_version).release[:3]):
        number = ".".join(map(str, release))
        raise TorchNpuError(
            f"torch_npu {own_version} is built for torch {number}, but torch {torch_version} is installed: install "
            "the same version of both"
        )


def _explained(error: Exception) -> str:
    if "cannot open shared object file" in str(error):
        return (
            f"torch_npu is installed, but a library of CANN is not found ({error}): install the CANN toolkit and its "
            "kernels, and run `source /usr/local/Ascend/ascend-toolkit/set_env.sh`. To use torch without an NPU "
            f"meanwhile, set {_AUTOLOAD}=0"
        )
    return f"torch_npu is installed, but importing it failed: {type(error).__name__}: {error}"


@contextmanager
def _without_autoload() -> Iterator[None]:
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_AUTOLOAD]
        else:
            os.environ[_AUTOLOAD] = before
