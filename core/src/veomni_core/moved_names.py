"""Gives names that have moved from their former homes for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(former: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module ``former``, some of whose names are now in ``homes``, by module."""

    def of_a_moved_name(name: str) -> Any:
        home = next((module for module, names in homes.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        advice = f"{former}.{name} is now {home}.{name}; the old name goes with the next release"
        warnings.warn(advice, FutureWarning, stacklevel=2)
        return getattr(importlib.import_module(home), name)

    return of_a_moved_name
