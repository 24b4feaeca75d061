"""Checks the types of a spec's fields when it is created, so that an error names the field and not a later use."""

from __future__ import annotations

import re
import sys
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from veomni_core.errors import SpecError

_TUPLE = re.compile(r"tuple\[(\w+), \.\.\.\]")
_MAPPING = re.compile(r"Mapping\[str, (\w+)\]")
_Spec = TypeVar("_Spec")
_PLAIN = {"str": str, "int": int, "bool": bool}
_WANTED = {str: "a string", int: "an integer", bool: "True or False"}


def check_fields(
    spec: Any,
    owner: str = "",
    *,
    names: Collection[str] = ("name",),
    references: Collection[str] = (),
    optional_references: Collection[str] = (),
) -> None:
    """Compare each field of ``spec``, a dataclass, with its annotation, and make tuples of other collections.

    Args:
        spec: the spec. Its annotations are ``str``, ``int``, ``bool``, a class, tuples of one of these, and mappings
            from strings to one of these; a number may also be ``None`` where its annotation says so.
        owner: what messages call it; without it, its class and its name.
        names: the strings that must not be empty.
        references: the strings that must read ``"module:attribute"``.
        optional_references: those that must read so unless they are empty.

    Raises:
        SpecError: a field holds something else; the message names it.
    """
    owner = owner or f"{type(spec).__name__} {spec.name!r}"
    for field, default, container, kind in _described(type(spec)):  # type: ignore[arg-type]
        value = getattr(spec, field)
        if (value is default and not value and field not in names) or (field in optional_references and not value):
            continue
        if field in references or field in optional_references:
            _require_reference(owner, field, value)
        elif container == "tuple":
            object.__setattr__(spec, field, instances_in(owner, field, value, kind))
        elif container == "mapping":
            _require_mapping(owner, field, value, kind)
        else:
            _require(owner, field, value, kind, filled=field in names, optional=default is None)


def from_data(kind: type[_Spec], data: Any) -> _Spec:
    """The dataclass that ``dataclasses.asdict`` turned into ``data``, which may have been JSON since.

    Raises:
        SpecError: it is no such mapping.
    """
    known = _described(kind)  # type: ignore[arg-type]
    required = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}  # type: ignore[arg-type]
    if not isinstance(data, Mapping) or not required <= {*data} <= {field for field, *_ in known}:
        raise SpecError(f"{kind.__name__}: expected a mapping of {', '.join(each[0] for each in known)}, not {data!r}")
    values = dict(data)
    for field, _, container, inner in known:
        if field in data and is_dataclass(inner):
            each = data[field]
            parts = instances_in(kind.__name__, field, each, dict) if container else ()
            values[field] = tuple(from_data(inner, part) for part in parts) if container else from_data(inner, each)
    return kind(**values)


@cache
def _described(kind: type) -> tuple[tuple[str, Any, str, type], ...]:
    """Of each field of the dataclass ``kind``: its name, its default, what contains the values, and their class."""
    known = ChainMap(*(vars(sys.modules[each.__module__]) for each in kind.__mro__[:-1]))  # subclasses may be of others
    found = []
    for each in fields(kind):
        annotation = str(each.type).removesuffix(" | None")
        match = _TUPLE.fullmatch(annotation) or _MAPPING.fullmatch(annotation)
        container = "" if match is None else "tuple" if match.re is _TUPLE else "mapping"
        name = match[1] if match else annotation
        named = _PLAIN.get(name) or known.get(name, object)
        found.append((each.name, each.default, container, named if isinstance(named, type) else object))
    return tuple(found)


def instances_in(owner: str, field: str, value: Any, kind: type) -> tuple[Any, ...]:
    """``value`` as a tuple; raises SpecError unless it is a collection of instances of ``kind``.

    Strings in it must not be empty. A single string is refused: as a collection it would be its characters.
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        held = {object: "", str: " of strings"}.get(kind, f" of {kind.__name__}")
        raise _wrong(owner, field, f"a tuple{held}", value)
    items = tuple(value)
    for item in items:
        if kind is str and not (isinstance(item, str) and item):
            raise SpecError(f"{owner}: {field} must hold non-empty strings, not {item!r} ({type(item).__name__})")
        _require(owner, field, item, kind)
    return items


def _require(
    owner: str, field: str, value: object, kind: type, *, filled: bool = False, optional: bool = False
) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)) or (filled and not value):
        wanted = "a non-empty string" if filled else _WANTED.get(kind, f"a {kind.__name__}")
        raise _wrong(owner, field, wanted + " or None" * optional, value)


def _require_reference(owner: str, field: str, value: object) -> None:
    module_name, colon, attribute = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not (colon and module_name and attribute):
        named = ", or be a function at the top of a module" * callable(value)
        raise SpecError(f'{owner}: {field} must read "module:attribute"{named}, not {value!r}')


def _require_mapping(owner: str, field: str, value: object, kind: type) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(owner, field, f"a mapping from strings to {kind.__name__}", value)
    for key, item in value.items():
        _require(owner, f"a key of {field}", key, str, filled=True)
        _require(owner, f"{field}[{key!r}]", item, kind)


def _wrong(owner: str, field: str, wanted: str, value: object) -> SpecError:
    return SpecError(f"{owner}: {field} must be {wanted}, not {value!r} ({type(value).__name__})")
