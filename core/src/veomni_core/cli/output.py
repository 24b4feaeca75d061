"""Arguments and options that subcommands share, with what the shell completes; and output as JSON, for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_core.descriptions.hardware import NAMED
from veomni_core.discovery.discover import discover
from veomni_core.jobs.jobfile import at_home

_JOBS = (".yaml", ".yml")


def complete_hardware(incomplete: str) -> list[str]:
    """The hardware that can be named, of the core and of plugins."""
    devices = discover().devices.values()
    return begin_with(incomplete, [*NAMED, *(name for device in devices for name in device.named)])


def complete_job(incomplete: str) -> list[str]:
    """YAML files, and folders that may hold some."""
    folder, _, name = incomplete.rpartition("/")
    typed = f"{folder}/" if "/" in incomplete else ""
    try:
        found = sorted(at_home(typed or ".").iterdir())
    except OSError:
        return []
    named = [path for path in found if path.name.startswith(name) and (name or not path.name.startswith("."))]
    folders = [f"{typed}{path.name}/" for path in named if path.is_dir()]
    return sorted([*folders, *(f"{typed}{path.name}" for path in named if path.suffix in _JOBS)])


def begin_with(incomplete: str, names: Iterable[str]) -> list[str]:
    """The ``names`` that the shell may complete, sorted."""
    return sorted({name for name in names if name.startswith(incomplete)})


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
