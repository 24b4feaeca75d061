"""The variables that a decorated function has captured."""

from __future__ import annotations

from types import CellType

from veomni_core.changes.forward_functions import Function, layers


def captured_cell(function: Function, name: str) -> CellType | None:
    """The cell of the variable ``name``, in ``function`` or the closest function that it closes over."""
    for layer in layers(function):
        for variable, cell in zip(layer.__code__.co_freevars, layer.__closure__ or (), strict=True):
            if variable == name:
                return cell
    return None
