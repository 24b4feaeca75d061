"""Declares the trainer's commands of `veomni`. Imports none of the training code."""

from __future__ import annotations

from veomni_core import CommandSpec, hookimpl

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_commands() -> list[CommandSpec]:
    """The commands, in the order in which a job needs them."""
    return [
        CommandSpec("init", "veomni_trainer.run.command:init", "Write a new job's YAML."),
        CommandSpec("schema", "veomni_trainer.run.command:schema", "Print the JSON schema of a job, for editors."),
        CommandSpec(
            "train",
            "veomni_trainer.run.command:train_command",
            "Train a model as a job's YAML says.",
            job_check="veomni_trainer.run.check:check_job",
        ),
        CommandSpec(
            "bisect",
            "veomni_trainer.bisect.command:bisect",
            "Find the kernels at which a job's run leaves the same job all-eager.",
        ),
        CommandSpec(
            "report",
            "veomni_trainer.run.command:report",
            "Write the report of a run, or of several runs together.",
        ),
        CommandSpec(
            "export",
            "veomni_trainer.run.command:export",
            "Write a checkpoint's weights as a plain folder of safetensors.",
        ),
        CommandSpec("chat", "veomni_trainer.run.chat_commands:chat", "Talk with the model of a run or an export."),
        CommandSpec(
            "generate", "veomni_trainer.run.chat_commands:generate", "Continue a text with the model of a run."
        ),
    ]
