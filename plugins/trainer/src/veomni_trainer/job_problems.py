"""Says what is wrong with a job: every problem in one message, with its dotted path and the nearest valid spelling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from veomni_core.errors import JobFileError, did_you_mean

_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_type": "text",
}


def explain_problems(error: ValidationError, root: type[BaseModel], source: str) -> JobFileError:
    """One error that lists every problem that pydantic found in the job from ``source``."""
    problems: dict[str, list[str]] = {}
    for detail in error.errors():
        path, problem = _describe(detail, root)
        if problem not in problems.setdefault(path, []):
            problems[path].append(problem)
    lines = [f"{path}: {_join(found)}" if path else _join(found) for path, found in problems.items()]
    if len(lines) == 1:
        return JobFileError(f"{source}: {lines[0]}")
    return JobFileError(f"{source}: {len(lines)} problems\n" + "\n".join(f"  - {line}" for line in lines))


def section_at(root: type[BaseModel], parts: Iterable[str]) -> type[BaseModel] | None:
    """The section class that ``parts`` lead to, or ``None`` where they lead to a value."""
    section: type[BaseModel] | None = root
    for part in parts:
        field = section.model_fields.get(part) if section else None
        section = _section_in(field.annotation) if field else None
    return section


def known_paths(root: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted path that a job may write."""
    paths = []
    for name, field in root.model_fields.items():
        section = _section_in(field.annotation)
        paths += [f"{prefix}{name}", *(known_paths(section, f"{prefix}{name}.") if section else [])]
    return paths


def shown(value: Any) -> str:
    """A value and its type, as an author of YAML knows them."""
    names = {bool: "true/false", int: "integer", float: "number", str: "text", list: "list", dict: "mapping"}
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({names.get(type(value), type(value).__name__)})"


def _describe(detail: ErrorDetails, root: type[BaseModel]) -> tuple[str, str]:
    """The dotted path of the key in question, without pydantic's marks for members of a union, and the problem."""
    parts: list[str] = []
    section: type[BaseModel] | None = root
    for part in detail["loc"]:
        name = str(part)
        if section is not None and name in section.model_fields:
            parts.append(name)
            section = _section_in(section.model_fields[name].annotation)
        elif section is not None and detail["type"] == "extra_forbidden":
            unknown = ".".join([*parts, name])
            return unknown, f"there is no such key. {did_you_mean(name, section.model_fields)}"
        elif isinstance(part, int):
            parts.append(f"{part}")
    path = ".".join(parts)
    if detail["type"] == "missing":
        return path, "is missing"
    if detail["type"] == "value_error":
        return path, str(detail["ctx"]["error"])
    wanted = _WANTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
    return path, f"must be {wanted}, got {shown(detail['input'])}"


def _join(problems: list[str]) -> str:
    """Alternatives of one key in one sentence: ``must be text or a list, got 3 (integer)``."""
    wants = [problem.rpartition(", got ") for problem in problems]
    if len(problems) == 1 or not all(separator for _, separator, _ in wants):
        return "; ".join(problems)
    first, *others = (want.removeprefix("must be ") for want, _, _ in wants)
    return f"must be {' or '.join([first, *others])}, got {wants[0][2]}"


def _section_in(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def is_free_mapping(root: type[BaseModel], parts: list[str]) -> bool:
    """Whether the value at ``parts`` may be a mapping whose keys the job's schema leaves open."""
    section = section_at(root, parts[:-1])
    field = section.model_fields.get(parts[-1]) if section else None
    return field is not None and any(_is_mapping(option) for option in [field.annotation, *get_args(field.annotation)])


def _is_mapping(annotation: Any) -> bool:
    origin = getattr(annotation, "__origin__", annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)
