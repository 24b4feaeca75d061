"""docs/reference/hooks.md: what a plugin may implement, and the fields of what its hooks return."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from reference_pages.markdown import prose, table
from veomni_core.descriptions import hookspecs
from veomni_core.descriptions.references import load_attribute

_HEAD = """# Hooks

A plugin is a module that an entry point in the group `{group}` names. It says `VEOMNI_PLUGIN_API_VERSION = 1` (or the
version since which a hook of it is there) and implements any of these hooks, each marked with `@hookimpl` (from
`veomni_core`). A hook returns descriptions and does nothing else: it imports no torch and looks at no device. Hooks are
called once, in this order, when plugins are discovered. The core supports these versions of the interface: {versions}.
[Write a plugin](../how-to/write-a-plugin.md) shows each of them at work.
"""


def page() -> str:
    """The page's text."""
    versions = ", ".join(map(str, hookspecs.PLUGIN_API_VERSIONS))
    head = _HEAD.format(group=hookspecs.ENTRY_POINT_GROUP, versions=versions)
    return "\n".join([head, *(line for hook in hookspecs.DESCRIPTIONS for line in _section(hook))])


def _section(hook: str) -> Iterator[str]:
    description = description_of(hook)
    yield f"## `{hook}`\n"
    yield f"`{hook}() -> Iterable[{description.__name__}]`. {prose(getattr(hookspecs, hook))}\n"
    yield f"`{description.__name__}`: {prose(description)}\n"
    said = arguments(description)
    fields = [each for each in dataclasses.fields(description) if each.init]
    yield from table(
        ("field", "default", ""),
        [(f"`{each.name}`", _default(each), said.get(each.name, "")) for each in fields],
    )
    yield ""


def description_of(hook: str) -> type:
    """The class of what ``hook`` returns, which another distribution may have."""
    _, found = hookspecs.DESCRIPTIONS[hook]
    kind: type = load_attribute(found) if isinstance(found, str) else found
    return kind


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def arguments(description: type) -> dict[str, str]:
    """The `Args:` of a docstring, by name; a line may say several names."""
    text = inspect.getdoc(description) or ""
    section = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    found: dict[str, str] = {}
    for names, said in re.findall(
        r"^    ([\w, ]+): (.*?)(?=^    \w[\w, ]*: |\Z)", section[1] if section else "", re.M | re.S
    ):
        for name in names.split(", "):
            found[name] = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(said.split())).replace("``", "`")
    return found
