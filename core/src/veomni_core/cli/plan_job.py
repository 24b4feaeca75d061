"""``veomni plan JOB.yaml``: which kernel a job would run at each site, without building its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veomni_core.cli.frozen import Frozen, frozen_job
from veomni_core.cli.output import AsJson, Changes, HardwareName, JobPath, print_json
from veomni_core.descriptions.references import load_for
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConfigError, HostError
from veomni_core.planning.plan import Plan
from veomni_core.planning.planner import plan_sites

_CHECKED_JOB = "veomni_transformers.cli.job_plan:checked_job"
_PARALLEL_PLAN = "veomni_transformers.engine.parallel_plan:get_parallel_plan"


def plan_job(
    job: JobPath,
    changes: Changes = None,
    hardware: HardwareName = None,
    sites: Annotated[
        Path | None,
        typer.Option("--sites", help="A plan in JSON: plan for its sites, and build no model.", dir_okay=False),
    ] = None,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Print which parameters tensor and expert parallelism can divide.")
    ] = False,
    frozen: Frozen = False,
    json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="List ops too that the model has no site for.")] = False,
) -> None:
    """Check the job, build its model on the meta device, find its sites, and print the plan."""
    registry = discover()
    if sites is not None:
        if parallel or changes:
            raise ConfigError("--sites plans for sites that are found already; leave --parallel and --set out")
        plan = _plan_of_sites(job, sites, hardware, registry)
    else:
        checked = _part(_CHECKED_JOB)(job, changes or (), hardware, registry)
        if parallel:
            divided = _part(_PARALLEL_PLAN)(checked.skeleton())
            print_json(divided.to_dict()) if json else print(divided.table())
            return
        plan = checked.plan()
    if locked := frozen_job(job):
        locked.check(plan)
    print(plan.to_json() if json else plan.table(everything))


def _plan_of_sites(job: Path, file: Path, hardware: str | None, registry: Registry) -> Plan:
    """The job's kernels at the sites of the plan in ``file``, under its autocast. Raises ConfigError if it is none."""
    from veomni_core.planning.config import OpsConfig

    try:
        found = Plan.from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--sites {file} is no plan ({type(error).__name__}: {error}); write one with veomni plan JOB.yaml --json"
        ) from error
    config = OpsConfig.from_yaml(job, registry)
    sites = (each.site for each in found.decisions)
    return plan_sites(sites, config, hardware=hardware, autocast=found.autocast, training=found.training)


def _part(reference: str) -> Any:
    """A function of the distribution that builds models. Raises HostError if it is not installed."""
    return load_for("veomni plan builds the job's model (to plan for given sites, use --sites):", HostError, reference)
