"""The trainer's command line, apart from what answers. The code of a command is imported only when it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from veomni_core.commands import AsJson, Changes, Frozen, JobPath, fit, frozen_job, print_json
from veomni_core.errors import ConfigError, did_you_mean
from veomni_trainer.run.terminal import INTERRUPTED, is_main_process

_COMPARABLE = ("eager", "eager-after")
_RESUME, _RESUME_FROM = "--resume", "--resume-from"

train_command = typer.Typer(add_completion=False, rich_markup_mode=None)


class _OptionalValues(TyperCommand):
    """Reads ``--resume=PATH``, where ``--resume`` alone is a flag: click would take the word after it for its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        valued = f"{_RESUME}="
        given = [f"{_RESUME_FROM}={each.removeprefix(valued)}" if each.startswith(valued) else each for each in args]
        return super().parse_args(ctx, given)


@train_command.command(cls=_OptionalValues)
def train(
    job: JobPath,
    changes: Changes = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="eager",
            help="Also train the same job all-eager, step by step in turns, and compare; eager-after: after this run.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(_RESUME, help="Continue from the newest checkpoint in train.output_dir; or --resume=PATH."),
    ] = False,
    resume_from: Annotated[Path | None, typer.Option(_RESUME_FROM, hidden=True)] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier run in train.output_dir, after the first step."),
    ] = False,
    accept_plan_change: Annotated[
        bool, typer.Option("--accept-plan-change", help="Resume even if other kernels would run than before.")
    ] = False,
    frozen: Frozen = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the summary and paths (or the dry run) as JSON; the rest goes to standard error."
        ),
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Say what the job would do, and the memory that it needs; train nothing.")
    ] = False,
) -> None:
    """Train a model as a job's YAML says, and write metrics, checkpoints and a report."""
    if compare is not None and compare not in _COMPARABLE:
        raise ConfigError(f"--compare {compare}: nothing to compare with. {did_you_mean(compare, _COMPARABLE)}")
    if (resume or resume_from) and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it; give one of the two")

    from veomni_trainer.job.load import load_job
    from veomni_trainer.setup.postponed import postpone_bitsandbytes

    loaded = load_job(job, changes or ())
    postpone_bitsandbytes(loaded)
    start, locked = Path(os.path.expanduser(resume_from)) if resume_from else resume, frozen_job(job)
    if dry:
        from veomni_trainer.run.dry_run import dry_run

        found = dry_run(loaded, resume=start, overwrite=overwrite, accept_plan_change=accept_plan_change, frozen=locked)
        print_json(found.to_dict()) if json else print(fit(found.describe()))
        return

    from veomni_trainer.output.folder import RunFolder
    from veomni_trainer.report.write import outcome
    from veomni_trainer.run.run_job import run_job

    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        interrupted = run_job(
            loaded,
            compare=compare,
            resume=start,
            overwrite=overwrite,
            accept_plan_change=accept_plan_change,
            frozen=locked,
        )
    if json and is_main_process():
        print_json(outcome(RunFolder(Path(loaded.train.output_dir)), interrupted))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one of its checkpoints.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the weights go; must not exist.")],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Whether code that comes with the model may run.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA run: the weights with the adapter in them, not the adapter.")
    ] = False,
    push_to: Annotated[
        str | None, typer.Option("--push-to", metavar="ORG/NAME", help="Send them to this repository of the Hub too.")
    ] = None,
) -> None:
    """Write a checkpoint's weights as a plain folder of safetensors, which from_pretrained loads."""
    from transformers.utils import logging

    from veomni_trainer.job.train_section import hub_name
    from veomni_trainer.output.disk import naming_failed_writes
    from veomni_trainer.output.export import check_push, export_checkpoint, push
    from veomni_trainer.output.folder import RunFolder

    try:
        check_push(push_to and hub_name(push_to))
    except ValueError as error:
        raise ConfigError(f"--push-to {push_to}: {error}") from None
    logging.disable_progress_bar()
    run = RunFolder(source)
    checkpoint = run.last_checkpoint()[1] if run.checkpoints() else source
    with naming_failed_writes(folder):
        said = export_checkpoint(checkpoint, folder, trust_remote_code, merge)
    print(f"{checkpoint} -> {folder}: {said}")
    if push_to:
        print(push(folder, push_to))


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of one run, or of up to eight.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="The page of several runs; by default comparison.html.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a run's report from what its folder holds, or compare several runs on one page."""
    if output and len(runs) == 1:
        raise ConfigError("--output names the page of several runs; one run's report is report.html in its folder")

    from veomni_trainer.output.disk import naming_failed_writes
    from veomni_trainer.output.folder import RunFolder
    from veomni_trainer.report.runs import comparison_of, read_runs, write_comparison
    from veomni_trainer.report.write import describe_run, figures_table, write_report

    read = read_runs(runs)
    if len(runs) == 1:
        folder = RunFolder(runs[0])
        with naming_failed_writes(folder.report):
            write_report(folder)
        print(folder.summary.read_text(encoding="utf-8") if json else describe_run(folder))
        return
    if output or not json:
        page = output or Path("comparison.html")
        write_comparison(read, page)
    if json:
        print_json(comparison_of(read))
    else:
        print(f"{figures_table({run.label: run.figures for run in read})}\nreport: {page}")


def init(
    job: Annotated[Path, typer.Argument(help="The YAML file to write; must not exist.")] = Path("job.yaml"),
    model: Annotated[
        str | None,
        typer.Option(help="A folder or Hub id with weights, a config's path, or a model type (a small, random model)."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="A file, a folder, a glob, a Hub id, or python-stdlib.")] = None,
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
    from veomni_trainer.job.new_job import new_job
    from veomni_trainer.run.check import check_loaded

    text = new_job(
        job.name,
        model=_ask(model, "--model", "Model (weights' folder or Hub id, config, or model type)", None),
        data=_ask(data, "--data", "Data (a file, folder, glob or Hub id)", None),
        output_dir=_ask(output_dir, "--output-dir", "Output folder", f"runs/{job.stem}"),
        steps=int(_ask(steps, "--steps", "Steps", "1000")),
        sequence_length=int(_ask(sequence_length, "--sequence-length", "Tokens per sequence", "1024")),
        preset=preset,
    )
    # Nothing is written that `veomni train` would refuse.
    check_loaded(parse_job(parse_yaml(text), str(job), job.parent), discover().detect_hardware())
    job.parent.mkdir(parents=True, exist_ok=True)
    with job.open("x", encoding="utf-8") as stream:
        stream.write(text)
    print(f"{job} is written. Next: veomni train {job} --dry-run")


def schema() -> None:
    """Print the JSON schema of a job: keys, values, descriptions, and the kernels that are installed here."""
    import json

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
