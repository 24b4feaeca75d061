"""Checks the types of a spec's fields when it is created, so that an error names the field and not a later use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from veomni_core.errors import SpecError

_Kind = TypeVar("_Kind")


def require_text(owner: str, field: str, value: object) -> None:
    """Raise SpecError unless ``value`` is a string; it may be empty."""
    if not isinstance(value, str):
        raise _wrong(owner, field, "a string", value)


def require_name(owner: str, field: str, value: object) -> None:
    """Raise SpecError unless ``value`` is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise _wrong(owner, field, "a non-empty string", value)


def require_reference(owner: str, field: str, value: object) -> None:
    """Raise SpecError unless ``value`` is a string of the form ``"module:attribute"``."""
    module_name, colon, attribute = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not (colon and module_name and attribute):
        raise SpecError(f'{owner}: {field} must read "module:attribute", not {value!r}')


def require_integer(owner: str, field: str, value: object, *, optional: bool = False) -> None:
    """Raise SpecError unless ``value`` is an integer (not a boolean), or ``None`` if ``optional``."""
    if isinstance(value, bool) or not isinstance(value, int):
        if optional and value is None:
            return
        raise _wrong(owner, field, "an integer or None" if optional else "an integer", value)


def require_boolean(owner: str, field: str, value: object) -> None:
    """Raise SpecError unless ``value`` is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise _wrong(owner, field, "True or False", value)


def require_instance(owner: str, field: str, value: object, kind: type) -> None:
    """Raise SpecError unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise _wrong(owner, field, f"a {kind.__name__}", value)


def names_in(owner: str, field: str, value: Any) -> tuple[str, ...]:
    """``value`` as a tuple; raises SpecError unless it is a collection of non-empty strings.

    A single string is refused: as a collection it would be its characters.
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise _wrong(owner, field, "a tuple of strings", value)
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name:
            raise SpecError(f"{owner}: {field} must hold non-empty strings, not {name!r} ({type(name).__name__})")
    return names


def instances_in(owner: str, field: str, value: Any, kind: type[_Kind]) -> tuple[_Kind, ...]:
    """``value`` as a tuple; raises SpecError unless it is a collection of instances of ``kind``."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise _wrong(owner, field, "a tuple" if kind is object else f"a tuple of {kind.__name__}", value)
    items = tuple(value)
    for item in items:
        require_instance(owner, field, item, kind)
    return items


def require_mapping(owner: str, field: str, value: object, kind: type) -> None:
    """Raise SpecError unless ``value`` maps non-empty strings to instances of ``kind``."""
    if not isinstance(value, Mapping):
        raise _wrong(owner, field, f"a mapping from strings to {kind.__name__}", value)
    for key, item in value.items():
        require_name(owner, f"a key of {field}", key)
        require_instance(owner, f"{field}[{key!r}]", item, kind)


def _wrong(owner: str, field: str, wanted: str, value: object) -> SpecError:
    return SpecError(f"{owner}: {field} must be {wanted}, not {value!r} ({type(value).__name__})")
