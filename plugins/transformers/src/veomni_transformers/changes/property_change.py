"""A module's attribute that reads as one value, whatever is set on the instance."""

from __future__ import annotations

from typing import Any

from torch import nn

from veomni_core.changes.change import ClassChange


class PropertyChange(ClassChange):
    """Makes the attribute ``name`` of one module read as ``value``, whatever the instance's ``__dict__`` holds."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        super().__init__(module, name, property(lambda self: value))
