"""Imports functions of Liger-Kernel; if that fails, the error says what to do about the installation.

Functions are imported from the submodules of ``liger_kernel.ops``, which hold the Triton kernels whatever the
environment says. The package ``liger_kernel.ops`` itself exports other objects under the same names if
``LIGER_KERNEL_IMPL`` is set, and ``liger_kernel.functional`` reads the environment at every call.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_SWITCH = "LIGER_KERNEL_IMPL"


def part(name: str, attribute: str) -> Any:
    """``attribute`` of ``liger_kernel.ops.<name>``.

    Raises:
        ImportError: the module can't be imported or has no such attribute; the message says what to do.
    """
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{name}"), attribute)
    except Exception as error:  # an import may raise anything; report it
        raise ImportError(_explained(error)) from error


def _explained(error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    try:
        installed = f"liger-kernel {version('liger-kernel')} is installed, but loading it failed ({reason})"
    except PackageNotFoundError:
        return f"liger-kernel is not installed ({reason}): pip install 'liger-kernel>=0.8.5,<0.9'"
    if switch := os.environ.get(_SWITCH):
        return f"{installed}; {_SWITCH}={switch} makes it load more than these kernels need: unset it"
    return f"{installed}; install it again: pip install --force-reinstall --no-deps 'liger-kernel>=0.8.5,<0.9'"
