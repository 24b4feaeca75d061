"""Declares the subcommands of veomni-tools to veomni-core. Does not import torch."""

from __future__ import annotations

from veomni_core import CommandSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            "explain", "veomni_tools.cli.explain:explain", "Why each kernel of an op would or would not run here."
        ),
        CommandSpec("doctor", "veomni_tools.cli.doctor:doctor", "Load every plugin on its own and say how it fares."),
        CommandSpec("tune", "veomni_tools.cli.tune:tune", "Measure a job's kernels at its model's shapes, for auto."),
        CommandSpec(
            "lock", "veomni_tools.cli.lock:lock", "Write down what is installed and what jobs run, for --frozen."
        ),
        CommandSpec(
            "new-plugin", "veomni_tools.cli.new_plugin:new_plugin", "Write a new plugin, with a kernel and tests."
        ),
        CommandSpec(
            "checkpoint", "veomni_tools.cli.checkpoint:checkpoint", "Look at a checkpoint, convert it, compare two."
        ),
    ]
