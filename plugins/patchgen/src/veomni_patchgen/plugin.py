"""Declares the subcommand patchgen to veomni-core. Imports neither torch nor libcst."""

from __future__ import annotations

from veomni_core import CommandSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            "patchgen",
            "veomni_patchgen.cli:patchgen",
            "Write modeling code with patches in it, and check that it fits.",
        ),
    ]
