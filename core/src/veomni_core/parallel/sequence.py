"""The former home of :mod:`veomni_transformers.sequence`; goes with the next release."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    home = "veomni_transformers.sequence"
    value = getattr(importlib.import_module(home), name)
    warnings.warn(f"veomni_core.parallel.sequence.{name} is now {home}.{name}", FutureWarning, stacklevel=2)
    return value
