"""Arguments and options that subcommands share; and output as JSON, for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_core.cli.completion import complete_hardware, complete_job

JobPath = Annotated[Path, typer.Argument(help="The training job's YAML.", autocompletion=complete_job)]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change one value of the job, e.g. train.steps=100."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        help="Plan for this hardware (h200, a100, sm75, ...) instead of this machine's.",
        autocompletion=complete_hardware,
    ),
]


def print_json(value: Any) -> None:
    """Print ``value`` as JSON to standard output."""
    print(json.dumps(value, indent=1))
