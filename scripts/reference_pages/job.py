"""docs/reference/job.md: every key of a training job, from the JSON schema that editors get too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from veomni_trainer.job.json_schema import job_schema

_HEAD = """# The job's keys

What `veomni train` reads, section by section. `veomni schema > job.schema.json` writes the same as JSON Schema, with
the kernels that are installed on your machine; an editor that knows YAML language servers checks a job against it with
`# yaml-language-server: $schema=job.schema.json` in the job's first line. Any key can be set from the command line:
`--set train.steps=100`.
"""


def page() -> str:
    """The page's text."""
    return job_page(job_schema())


def job_page(schema: dict[str, Any]) -> str:
    """The page for ``schema``."""
    lines = [_HEAD]
    for name, section in schema["properties"].items():
        lines += [f"## `{name}`", "", *_table(_resolved(section, schema), schema, name in schema["required"])]
    return "\n".join(lines)


def _table(section: dict[str, Any], schema: dict[str, Any], required: bool) -> Iterator[str]:
    description = section.get("description", "").replace("``", "`").strip()
    yield description + ("" if required else " The section may be left out.")
    yield ""
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    for key, value in sorted(
        section["properties"].items(), key=lambda item: item[0] not in section.get("required", ())
    ):
        default = "required" if key in section.get("required", ()) else _shown(value.get("default"))
        text = " ".join(_description(value, schema).split()).replace("``", "`").replace("|", "\\|")
        yield f"| `{key}` | {_values(value, schema)} | {default} | {text} |"
    yield ""


def _values(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """What may be written, in a word or two."""
    if "anyOf" in value:
        options = dict.fromkeys(_values(option, schema) for option in value["anyOf"] if option.get("type") != "null")
        return " or ".join(options)
    if "$ref" in value:
        return ", ".join(f"`{key}:`" for key in _resolved(value, schema)["properties"])
    if "enum" in value:
        return " ".join(f"`{_text(each)}`" for each in value["enum"])
    if "const" in value:
        return f"`{_text(value['const'])}`"
    if value.get("type") == "array":
        return f"a list of {_values(value.get('items', {}), schema)}"
    named = {"integer": "an integer", "number": "a number", "string": "text", "boolean": "true or false"}
    limits = [f"{word} {value[key]:g}" for key, word in _LIMITS.items() if key in value]
    return named.get(value.get("type", ""), "a mapping") + (", " if limits else "") + " and ".join(limits)


_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _resolved(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    options = [value, *value.get("anyOf", ())]
    reference = next((option["$ref"] for option in options if "$ref" in option), None)
    return schema["$defs"][reference.rpartition("/")[2]] if reference else value


def _description(value: dict[str, Any], schema: dict[str, Any]) -> str:
    return value.get("description") or _resolved(value, schema).get("description", "")


def _shown(default: Any) -> str:
    return "" if default in (None, {}, []) else f"`{_text(default)}`"


def _text(value: Any) -> str:
    return (
        {True: "true", False: "false"}[value]
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
    )
