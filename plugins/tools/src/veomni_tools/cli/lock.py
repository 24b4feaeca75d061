"""``veomni lock``: writes down what is installed, what it describes, and what jobs run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from veomni_core.cli.frozen import LOCK_FILE
from veomni_core.cli.output import complete_hardware, complete_job
from veomni_core.discovery.discover import describe, discover
from veomni_core.discovery.lock_guard import FROZEN
from veomni_core.errors import ConfigError, HostError, LockFileError
from veomni_tools.locks.lock_file import Lock, LockedPlan, read_lock
from veomni_tools.locks.locked import installed, with_specs
from veomni_transformers.cli.job_plan import checked_job


def lock(
    jobs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="JOB.yaml", help="Jobs whose plans are locked too.", autocompletion=complete_job, show_default=False
        ),
    ] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            "--hardware",
            help="Lock the plans for this hardware (h200, a100, ...) instead of this machine's; may be repeated.",
            autocompletion=complete_hardware,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", help="The file to write.")] = Path(LOCK_FILE),
) -> None:
    """Write the versions and hashes of all plugins, what they describe, and the plans of jobs. Nothing is trained."""
    if os.environ.get(FROZEN):
        raise ConfigError(f"{FROZEN} is set, and this may differ from {os.environ[FROZEN]}; unset it to lock anew")
    if hardware and not jobs:
        raise ConfigError("--hardware says for what jobs are planned; name the jobs too")
    distributions = installed()
    records = describe(os.environ)
    locked = with_specs(distributions, records)
    plans = {key: plan for job in jobs or () for key, plan in _plans(job, hardware or [None], output).items()}
    text = Lock(locked.distributions, _by_job(plans)).to_text()
    before = _jobs_before(output)
    _write(output, text)
    print(f"{output} is written; distributions: {len(distributions)}, plans: {len(plans)}")
    for record in records:
        if not record.healthy:
            print(f"without what it describes: plugin {record.name} of {record}, which {record.absence}")
    if dropped := sorted(before - {job for job, _ in plans}):
        print(f"no longer in it: {', '.join(dropped)}. Name all jobs in one call to keep their plans")


def _plans(job: Path, hardware: list[str] | list[None], output: Path) -> dict[tuple[str, str], LockedPlan]:
    """The job's plan for each hardware."""
    from veomni_tools.locks.locked_plans import hardware_key, job_key, locked_plan

    registry = discover()
    made = [checked_job(job, (), name, registry).plan() for name in hardware]
    return {(job_key(job, output), hardware_key(plan.hardware)): locked_plan(plan) for plan in made}


def _by_job(plans: dict[tuple[str, str], LockedPlan]) -> dict[str, dict[str, LockedPlan]]:
    jobs: dict[str, dict[str, LockedPlan]] = {}
    for (job, hardware), plan in plans.items():
        jobs.setdefault(job, {})[hardware] = plan
    return jobs


def _jobs_before(output: Path) -> set[str]:
    """The jobs of the file that is replaced; none if it can't be read, which is why it is written again."""
    try:
        return {*read_lock(output).jobs}
    except LockFileError:
        return set()


def _write(output: Path, text: str) -> None:
    """Write the file so that it appears whole."""
    written = output.with_name(f"{output.name}.{os.getpid()}")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(output)
    except OSError as error:
        raise HostError(f"{output} can't be written: {error}") from error
    finally:
        written.unlink(missing_ok=True)
