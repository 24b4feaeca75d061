"""``veomni bisect``: the command line. Its code is imported only when the command runs."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from veomni_core.commands import AsJson, Changes, JobPath, print_json
from veomni_core.errors import ConfigError


def bisect(
    job: JobPath,
    changes: Changes = None,
    steps: Annotated[int, typer.Option(help="How many steps each run takes.", min=1)] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(help="The relative difference of losses that is rounding. [by the job's dtype]", min=0.0),
    ] = None,
    json: AsJson = False,
) -> None:
    """Find the sites whose kernels make a job's run leave the same job all-eager; exit 1 if there are some."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "veomni bisect trains in one process, but torchrun started several; start it without torchrun"
        )

    from veomni_core.commands import fit
    from veomni_trainer.job.load import load_job
    from veomni_trainer.setup.postponed import postpone_bitsandbytes

    postpone_bitsandbytes(load_job(job, changes or ()))
    from veomni_trainer.bisect.sites import find_causes

    found = find_causes(job, changes or (), steps, tolerance, say=lambda text: None if json else print(fit(text)))
    if json:
        print_json(found.to_dict())
    else:
        print(fit(found.describe()))
    if found.causes:
        raise typer.Exit(1)
