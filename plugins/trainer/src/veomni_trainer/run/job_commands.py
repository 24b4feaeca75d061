"""``veomni init`` and ``veomni schema``: what helps to write a job. Their code is imported only when they run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from veomni_core.errors import ConfigError


def init(
    job: Annotated[Path, typer.Argument(help="The YAML file to write; must not exist.")] = Path("job.yaml"),
    model: Annotated[
        str | None,
        typer.Option(help="A folder of weights, a config's path, a Hub id, or a model type (a small, random model)."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="A file, a folder, a glob, or python-stdlib.")] = None,
    output_dir: Annotated[str | None, typer.Option(help="The run's folder.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    preset: Annotated[str, typer.Option(help="Which kernels: auto, eager, gpu, ...")] = "auto",
) -> None:
    """Write a new job's YAML. Asks for what no option says; in a script, options that have no default are required."""
    if job.exists():
        raise ConfigError(f"{job} exists; name a file that doesn't, or edit that one")

    from veomni_core import discover
    from veomni_core.commands import parse_yaml
    from veomni_trainer.job.load import parse_job
    from veomni_trainer.job.new_job import NewJob
    from veomni_trainer.run.check import check_loaded

    answers = NewJob(
        model=_ask(model, "--model", "Model (weights' folder, config, Hub id or model type)", None),
        data=_ask(data, "--data", "Data (a file, folder or glob)", None),
        output_dir=_ask(output_dir, "--output-dir", "Output folder", f"runs/{job.stem}"),
        steps=int(_ask(steps, "--steps", "Steps", "1000")),
        sequence_length=int(_ask(sequence_length, "--sequence-length", "Tokens per sequence", "1024")),
        preset=preset,
    )
    text = answers.to_yaml(job.name)
    # Nothing is written that `veomni train` would refuse.
    check_loaded(parse_job(parse_yaml(text), str(job), job.parent), discover().detect_hardware())
    job.parent.mkdir(parents=True, exist_ok=True)
    with job.open("x", encoding="utf-8") as stream:
        stream.write(text)
    print(f"{job} is written. Next: veomni train {job} --dry-run")


def schema() -> None:
    """Print the JSON schema of a job: keys, values, descriptions, and the kernels that are installed here."""
    from veomni_trainer.job.json_schema import job_schema

    print(json.dumps(job_schema(), indent=1))


def _ask(value: str | int | None, option: str, question: str, default: str | None) -> str:
    """The option's value; else the answer of who sits at the terminal; else the default."""
    if value is not None:
        return str(value)
    if sys.stdin.isatty():
        answer: str = typer.prompt(question, default=default)
        return answer
    if default is None:
        raise ConfigError(f"{option} is missing, and there is no terminal to ask at")
    return default
