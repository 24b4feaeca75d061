"""docs/reference/verbs.md: every verb with its options, the exit codes, and hardware by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reference_pages.markdown import prose, table
from reference_pages.repository import registry
from veomni_core.cli import BAD_USAGE, FALLS_SHORT, GOOD
from veomni_core.cli.app import BUILTIN_VERBS, command
from veomni_core.descriptions.hardware import NAMED
from veomni_core.descriptions.spec import CommandSpec
from veomni_trainer.run.terminal import INTERRUPTED

_HEAD = """# Verbs

Every verb of `veomni` with its arguments and options. A plugin may bring verbs; those of
[veomni-trainer](../../plugins/trainer/README.md) and of [veomni-hub](../../plugins/hub/README.md) are here too.
[The `veomni` command](command-line.md) says what they print and remember.
"""
_EXIT_CODES = {
    GOOD: "it did what was asked",
    FALLS_SHORT: "this machine, a plugin, a file or a run falls short; a check failed, or nothing could be checked",
    BAD_USAGE: "the command line or the job must be corrected",
    INTERRUPTED: "`veomni train` was ended early by a signal",
}


def page() -> str:
    """The page's text."""
    codes = table(("code", "when"), ((str(code), when) for code, when in _EXIT_CODES.items()))
    lines = [_HEAD, *_verbs(), "## Exit codes\n", *codes, "", "## Names of hardware\n"]
    return "\n".join([*lines, "`--hardware` takes one of these, or any `sm75`-like name:\n", *_hardware(), ""])


def _verbs() -> Iterator[str]:
    brought = [(spec, "veomni-core") for spec in BUILTIN_VERBS]
    brought += [(spec, each.distribution) for each in registry().plugins for spec in each.commands]
    for spec, distribution in brought:
        yield from _verb(spec, distribution)


def _verb(spec: CommandSpec, distribution: str) -> Iterator[str]:
    found = command(spec)
    yield f"## `veomni {spec.name}`\n"
    if not hasattr(found, "commands"):
        yield from _arguments(found, f"From {distribution}. ")
        return
    yield f"From {distribution}. {found.help}\n"
    for name, each in found.commands.items():
        yield f"### `veomni {spec.name} {name}`\n"
        yield from _arguments(each)


def _arguments(found: Any, start: str = "") -> Iterator[str]:
    shown = [parameter for parameter in found.params if not getattr(parameter, "hidden", False)]
    yield f"{start}{prose(found.callback)}\n"
    if shown:
        rows = [(f"`{_written(each)}`", _default(each), each.help or "") for each in shown]
        yield from table(("argument or option", "default", ""), rows)
        yield ""


def _written(parameter: Any) -> str:
    """How a parameter is written: ``JOB``, ``--json`` or ``--hardware HARDWARE``."""
    value = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return str(value)
    names = ", ".join(parameter.opts)
    return names if parameter.is_flag else f"{names} {value}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    return "" if parameter.default in (None, False) else f"`{parameter.default}`"


def _hardware() -> Iterator[str]:
    named = [(each.distribution, device.named) for each in registry().plugins for device in each.devices]
    rows = [(", ".join(f"`{name}`" for name in names), who) for who, names in [("veomni-core", NAMED), *named]]
    yield from table(("name", "from"), rows)
