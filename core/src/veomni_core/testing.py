"""The former home of the conformance check, which is :mod:`veomni_conformance` now; goes with the next release."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_MOVED = ("CaseResult", "ConformanceReport", "KernelConformance", "check_kernel")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'veomni_core.testing' has no attribute {name!r}")
    warnings.warn(f"veomni_core.testing.{name} is now veomni_conformance.{name}", FutureWarning, stacklevel=2)
    return getattr(importlib.import_module("veomni_conformance"), name)
