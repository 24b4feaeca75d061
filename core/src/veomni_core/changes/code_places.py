"""Where code stands that a proof has read, so that it is seen when other code is put there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import FunctionType
from typing import Any

from veomni_core.changes.forward_functions import contents_of

_ABSENT = object()


class CodePlace:
    """An attribute of a class, or an entry of a namespace or a table, and what stands there now.

    It is compared by identity; of a function also its code, its defaults, and what it closes over.

    Args:
        holder: the class, whose parents are looked through too; or the namespace or table.
        name: the attribute, or the key.
        label: what messages call the place.
    """

    __slots__ = ("_holder", "_label", "_name", "_parts", "_was")

    def __init__(self, holder: type | Mapping[str, Any], name: str, label: str) -> None:
        self._holder, self._name, self._label = holder, name, label
        self._was = self._found()
        self._parts = _parts(self._was)

    @property
    def key(self) -> Hashable:
        """Equal for two objects of one place."""
        return (id(self._holder), self._name)

    def replaced(self) -> str:
        """What was done there since, as a phrase; empty if what stood there stands there."""
        found = self._found()
        if found is not self._was:
            return f"{self._label} was {'removed' if found is _ABSENT else 'replaced'}"
        parts = _parts(found)
        if len(parts) != len(self._parts) or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            return f"the code of {self._label} was changed"
        return ""

    def _found(self) -> Any:
        if not isinstance(self._holder, type):
            return self._holder.get(self._name, _ABSENT)
        for base in self._holder.__mro__:
            if self._name in base.__dict__:
                return base.__dict__[self._name]
        return _ABSENT


def _parts(value: Any) -> tuple[Any, ...]:
    function = getattr(value, "fget" if type(value) is property else "__func__", value)
    if type(function) is not FunctionType:
        return ()
    cells = map(contents_of, function.__closure__ or ())
    return (function.__code__, function.__defaults__, function.__kwdefaults__, *cells)
