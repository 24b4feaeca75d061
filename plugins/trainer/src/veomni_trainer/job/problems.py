"""Reports all problems of a job in one message, each with its dotted path and the nearest valid spelling."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from veomni_core.commands import job_file_error, shown
from veomni_core.errors import JobFileError, did_you_mean, suggest
from veomni_trainer.job.synonyms import SYNONYMS
from veomni_transformers.jobs.job_model import ALIASES, ModelSection, ModelSectionError

_QUOTED = re.compile(r"'([^']*)'")
_ELSEWHERE = {
    "lora.r": "write lora.rank",
    "lora.lora_alpha": "write lora.alpha",
    "lora.lora_dropout": "write lora.dropout",
    "train.bf16": "write train.precision: bf16_mixed (float32 weights under autocast to bfloat16), bf16 (all in "
    "bfloat16), fp16_mixed or float32",
}
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
    """One error that lists every problem that pydantic and the core found in the job from ``source``."""
    problems: dict[str, list[str]] = {}
    for detail in error.errors():
        for path, problem in _describe(detail, root):
            if problem not in problems.setdefault(path, []):
                problems[path].append(problem)
    return job_file_error(source, {path: _join(found) for path, found in problems.items()})


def no_such_key(path: str, suggestion: str) -> str:
    """What to say of the unknown key at ``path``: what to write for it, or else ``suggestion``."""
    return f"there is no such key; {_ELSEWHERE[path]}" if path in _ELSEWHERE else f"there is no such key. {suggestion}"


def keys_of(section: type) -> dict[str, Any]:
    """The keys of a section (the trainer's sections, or the core's ``model``), with the types of their values."""
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    keys = {name: hint for name, hint in get_type_hints(section).items() if not name.startswith("_")}
    return {**keys, **{alias: keys[name] for alias, name in ALIASES.items()}}


def section_at(root: type, parts: Iterable[str]) -> type | None:
    """The class of the section at the path ``parts``, or ``None`` if there is a value at that path."""
    section: type | None = root
    for part in parts:
        section = _section_in(keys_of(section).get(part)) if section else None
    return section


def known_paths(root: type, prefix: str = "") -> list[str]:
    """Every dotted path that a job may contain."""
    paths = []
    for name, annotation in keys_of(root).items():
        section = _section_in(annotation)
        paths += [f"{prefix}{name}", *(known_paths(section, f"{prefix}{name}.") if section else [])]
    return paths


def _describe(detail: ErrorDetails, root: type[BaseModel]) -> Iterable[tuple[str, str]]:
    """Pairs of dotted path and problem. Drops the names that pydantic adds to a path for the members of a union."""
    parts: list[str] = []
    section: type | None = root
    for part in detail["loc"]:
        name = str(part)
        if isinstance(part, int):
            parts.append(name)
        elif section is not None and name in keys_of(section):
            parts.append(name)
            annotation = keys_of(section)[name]
            section = _section_in(annotation) or _section_in_list(annotation)
        elif section is not None and detail["type"] == "extra_forbidden":
            unknown = ".".join([*parts, name])
            hint = suggest(name, keys_of(section), SYNONYMS) or suggest(name, known_paths(root), SYNONYMS)
            return [(unknown, no_such_key(unknown, hint or did_you_mean(name, keys_of(section))))]
    path = ".".join(parts)
    if detail["type"] == "missing":
        return [(path, "is missing")]
    if detail["type"] == "value_error":
        error = detail["ctx"]["error"]
        return error.problems.items() if isinstance(error, ModelSectionError) else [(path, str(error))]
    wanted = _WANTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
    return [(path, f"must be {wanted}, got {shown(detail['input'])}{_hint(detail)}")]


def _hint(detail: ErrorDetails) -> str:
    """The one of the allowed texts that was probably meant, as a sentence."""
    allowed = _QUOTED.findall(detail["ctx"]["expected"]) if detail["type"] == "literal_error" else []
    hint = suggest(str(detail["input"]), allowed)
    return hint and f". {hint}"


def _join(problems: list[str]) -> str:
    """Joins the problems of one key: alternatives become one sentence, ``must be text or a list, got 3 (integer)``."""
    wants = [problem.rpartition(", got ") for problem in problems]
    if len(problems) == 1 or not all(separator for _, separator, _ in wants):
        return "; ".join(problems)
    first, *others = (want.removeprefix("must be ") for want, _, _ in wants)
    return f"must be {' or '.join([first, *others])}, got {wants[0][2]}"


def _section_in(annotation: Any) -> type | None:
    if get_origin(annotation) is list:
        return None
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, (BaseModel, ModelSection))), None)


def _section_in_list(annotation: Any) -> type | None:
    """The class of the sections of which the value is a list."""
    lists = [option for option in [annotation, *get_args(annotation)] if get_origin(option) is list]
    return next((section for each in lists if (section := _section_in(*get_args(each)))), None)


def is_free_mapping(root: type, parts: list[str]) -> bool:
    """Whether the value at the path ``parts`` may be a mapping with arbitrary keys."""
    section = section_at(root, parts[:-1])
    annotation = keys_of(section).get(parts[-1]) if section else None
    return any(_is_mapping(option) for option in [annotation, *get_args(annotation)])


def _is_mapping(annotation: Any) -> bool:
    origin = getattr(annotation, "__origin__", annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)
