"""Output options that subcommands share: a table for people, JSON for programs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
HardwareName = Annotated[
    str | None,
    typer.Option("--hardware", help="Plan for this hardware (h200, a100, sm75, ...) instead of this machine's."),
]


def print_json(value: Any) -> None:
    """Print ``value`` as JSON to standard output."""
    print(json.dumps(value, indent=1))
