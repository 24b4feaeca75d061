"""Declares ``veomni verify`` to veomni-core. Does not import torch."""

from __future__ import annotations

from veomni_core import CommandSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_commands() -> list[CommandSpec]:
    return [
        CommandSpec("verify", "veomni_conformance.cli.verify:verify", "Run a plugin's kernels against their contracts.")
    ]
