"""``veomni plan JOB.yaml``: which kernel a job would run at each site, without building its weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from veomni_core.cli.output import AsJson, Changes, HardwareName, JobPath, print_json
from veomni_core.descriptions.references import load_attribute
from veomni_core.descriptions.spec import JobConditions
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import JobFileError, VeOmniError
from veomni_core.jobs.assignments import assigned, read_assignments
from veomni_core.jobs.job_model import model_section_of
from veomni_core.jobs.jobfile import load_yaml
from veomni_core.planning.config import OpsConfig


def plan_job(
    job: JobPath,
    changes: Changes = None,
    hardware: HardwareName = None,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Print which parameters tensor and expert parallelism can divide.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check the job, build its model on the meta device, find its sites, and print the plan."""
    written, assignments = load_yaml(job), read_assignments(changes or ())
    registry = discover()
    # Before torch is imported: a broken device library may make that fail, and the device's plugin can say why.
    target = registry.named_hardware(hardware) if hardware else registry.detect_hardware()
    sections = dict.fromkeys([*map(str, written), *(each.parts[0] for each in assignments)])
    conditions = _conditions([name for name in sections if name != "model"], job, changes or [], registry)
    data = assigned(written, assignments)
    if conditions.device and not hardware:
        target = registry.detect_hardware(conditions.device)
    section = model_section_of(data, str(job), job.parent)
    config = OpsConfig.from_dict({"model": {"ops_implementation": section.ops_implementation}}, registry)

    from veomni_core.build import build_skeleton, check_weights
    from veomni_core.planning.planner import make_plan
    from veomni_core.sites.engine.parallel_plan import get_parallel_plan

    assumed: tuple[str, ...] = ()
    if section.weights is not None:
        if target.detected or Path(section.weights).exists():
            check_weights(Path(section.weights))
        else:
            assumed = (f"model.weights: {section.weights}",)
    skeleton = build_skeleton(section.source, torch_dtype=section.dtype, trust_remote_code=section.trust_remote_code)
    if parallel:
        divided = get_parallel_plan(skeleton)
        print_json(divided.to_dict()) if json else print(divided.table())
        return
    plan = make_plan(
        skeleton,
        config,
        hardware=target,
        autocast=conditions.autocast,
        distributed_config=conditions.distributed_config,
    )
    plan = replace(plan, assumptions=(*plan.assumptions, *assumed))
    print(plan.to_json() if json else plan.table())


def _conditions(others: list[str], job: Path, changes: list[str], registry: Registry) -> JobConditions:
    """The conditions under which a plugin's subcommand would run this job; raises what that subcommand would raise.

    A job with only a ``model`` section is not checked.

    Args:
        others: the job's sections besides ``model``.
        job: its file.
        changes: the values of ``--set``.
        registry: where the subcommands are found.
    """
    if not others:
        return JobConditions()
    problems: dict[str, VeOmniError] = {}
    verbs = [command for command in registry.commands.values() if command.job_check]
    for verb in verbs:
        check = load_attribute(verb.job_check)
        try:
            return (check(job, changes=changes) if changes else check(job)) or JobConditions()
        except VeOmniError as error:
            problems[verb.name] = error
    if not verbs:
        sections = ", ".join(others)
        print(f"not checked: {sections}. No installed plugin runs jobs; install veomni-trainer", file=sys.stderr)
    elif len(problems) == 1:
        raise next(iter(problems.values()))
    else:
        raise JobFileError("\n".join(f"veomni {verb}: {error}" for verb, error in problems.items()))
    return JobConditions()
