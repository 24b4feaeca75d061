"""Imports functions of the libraries; if that fails, the error says what to do about the installation."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_FLA = "fla-core"
# fla reads these when it is imported, and then compiles or chooses other kernels than those that were verified.
_SWITCHES = ("FLA_CACHE_MODE", "FLA_TRIL_PRECISION", "FLA_USE_FAST_OPS", "FLA_USE_TMA")
_WITHOUT_EFFECT = ("", "0", "disabled", "ieee")
_OLD_FLA = "flash-linear-attention"  # old releases bring the whole package that fla-core brings now


def of_fla(module: str, attribute: str) -> Any:
    """``attribute`` of ``fla.<module>``.

    Raises:
        ImportError: fla can't be imported, is another version than its distribution's, or has no such attribute; or a
            variable of the environment changes its kernels. The message says what to do.
    """
    for switch in _SWITCHES:
        if (value := os.environ.get(switch, "")).lower() not in _WITHOUT_EFFECT:
            raise ImportError(f"{switch}={value} makes fla run other kernels than those that are verified: unset it")
    imported, installed = of_library(_FLA, "fla", "__version__"), _version(_FLA)
    if imported != installed:
        other = _version(_OLD_FLA)
        culprit = f"{_OLD_FLA} {other} brings it too: pip uninstall {_OLD_FLA}" if other else "remove the other one"
        raise ImportError(
            f"the package fla that is imported is {imported}, and {_FLA} {installed} is installed; {culprit}, then "
            f"pip install --force-reinstall --no-deps '{_FLA}=={installed}'"
        )
    return of_library(_FLA, f"fla.{module}", attribute)


def of_library(distribution: str, module: str, attribute: str) -> Any:
    """``attribute`` of ``module``, which ``distribution`` brings.

    Raises:
        ImportError: the module can't be imported or has no such attribute; the message says what to do.
    """
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import may raise anything; report it
        raise ImportError(_explained(distribution, module.partition(".")[0], error)) from error


def _explained(distribution: str, package: str, error: Exception) -> str:
    reason, installed = f"{type(error).__name__}: {error}", _version(distribution)
    if installed is None:
        wanted = "veomni-fla[fla]" if distribution == _FLA else distribution
        return f"{distribution} is not installed ({reason}): pip install '{wanted}'"
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing not in ("", package):
        return f"{distribution} {installed} needs {missing}, which is not installed: pip install {missing}"
    return (
        f"{distribution} {installed} is installed, but loading it failed ({reason}); install it again: "
        f"pip install --force-reinstall --no-deps '{distribution}=={installed}'"
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
