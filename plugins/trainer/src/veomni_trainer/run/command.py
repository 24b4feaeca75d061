"""``veomni train`` and ``veomni export``: the command line. Their code is imported only when a command runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from veomni_core.commands import Changes, Frozen, JobPath, fit, frozen_job, print_json
from veomni_core.errors import ConfigError, did_you_mean
from veomni_trainer.loop.signals import INTERRUPTED

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
    from veomni_trainer.run.console import is_main_process
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

    from veomni_trainer.job.output_keys import hub_name
    from veomni_trainer.output.export import export_checkpoint
    from veomni_trainer.output.folder import RunFolder
    from veomni_trainer.output.hub import check_push, push

    try:
        check_push(push_to and hub_name(push_to))
    except ValueError as error:
        raise ConfigError(f"--push-to {push_to}: {error}") from None
    logging.disable_progress_bar()
    run = RunFolder(source)
    checkpoint = run.last_checkpoint()[1] if run.checkpoints() else source
    said = export_checkpoint(checkpoint, folder, trust_remote_code, merge)
    print(f"{checkpoint} -> {folder}: {said}")
    if push_to:
        print(push(folder, push_to))
