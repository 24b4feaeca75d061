"""Names of Python objects as text: descriptions hold them, and what they name is imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any


def load_attribute(reference: str) -> Any:
    """Import ``"module:attribute"`` (the attribute may be dotted) and return it."""
    module_name, _, attribute = reference.partition(":")
    value: Any = importlib.import_module(module_name)
    for name in attribute.split("."):
        value = getattr(value, name)
    return value
