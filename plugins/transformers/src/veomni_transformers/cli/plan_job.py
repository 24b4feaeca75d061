"""``veomni plan JOB.yaml``: which kernel a job would run at each site, without building its weights."""

from __future__ import annotations

from typing import Annotated

import typer

from veomni_core.cli.frozen import Frozen
from veomni_core.cli.output import AsJson, Changes, HardwareName, JobPath, print_json
from veomni_core.discovery.discover import discover
from veomni_transformers.cli.job_plan import checked_job


def plan_job(
    job: JobPath,
    changes: Changes = None,
    hardware: HardwareName = None,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Print which parameters tensor and expert parallelism can divide.")
    ] = False,
    frozen: Frozen = False,
    json: AsJson = False,
) -> None:
    """Check the job, build its model on the meta device, find its sites, and print the plan."""
    checked = checked_job(job, changes or (), hardware, discover())
    if parallel:
        from veomni_transformers.engine.parallel_plan import get_parallel_plan

        divided = get_parallel_plan(checked.skeleton())
        print_json(divided.to_dict()) if json else print(divided.table())
        return
    plan = checked.plan()

    from veomni_core.planning.locked_plans import frozen_job

    if locked := frozen_job(job):
        locked.check(plan)
    print(plan.to_json() if json else plan.table())
