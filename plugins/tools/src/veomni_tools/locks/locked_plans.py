"""A job's plan in a lock file, and its comparison with the plan that is made now."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from veomni_core.descriptions.hardware import Hardware
from veomni_core.discovery.lock_guard import FROZEN
from veomni_core.errors import LockMismatchError
from veomni_core.jobs.jobfile import at_home
from veomni_core.planning.plan import Plan
from veomni_tools.locks.lock_file import Lock, LockedPlan, read_lock
from veomni_tools.locks.locked import mismatch

logger = logging.getLogger(__name__)
_NAMED = 5  # sites that a message names of one change; the others are counted


def locked_plan(plan: Plan) -> LockedPlan:
    """``plan`` as a lock file holds it."""
    identity = plan.identity()
    sites: dict[str, dict[str, str]] = defaultdict(dict)
    for key, runs in sorted(identity["sites"].items()):
        op_name, _, rest = key.partition("|")
        path, rule, variant = rest.rsplit("|", 2)
        of_variant, where = sites[f"{op_name}/{'?' if variant == 'None' else variant}"], path or "the model"
        of_variant[where if where not in of_variant else f"{where} ({rule})"] = runs
    autocast = f"autocast to {plan.autocast}" if plan.autocast else "no autocast"
    return LockedPlan(plan.sha256, f"{autocast}, for {plan.use}", dict(sites), identity["kernels"])


def hardware_key(hardware: Hardware) -> str:
    """What of ``hardware`` a plan depends on: ``cuda 9.0``, without the product's name."""
    return replace(hardware, name="").describe()


def job_key(job: Path, lock: Path) -> str:
    """The name of the job in the file ``job`` in the lock file ``lock``: its path from the lock file's folder."""
    return Path(os.path.relpath(job.absolute(), lock.absolute().parent)).as_posix()


@dataclass(frozen=True)
class FrozenJob:
    """A job whose plan must be that of a lock file.

    Attributes:
        lock: the lock file.
        name: the job's name there.
    """

    lock: Lock
    name: str

    def __str__(self) -> str:
        return str(self.lock.path)

    def check(self, plan: Plan) -> None:
        """Compare ``plan`` with the one that was locked for its hardware. A lock without jobs is a warning.

        Raises:
            LockMismatchError: the job, or the hardware, is not in the lock file; or the plan differs, and the message
                names the sites.
        """
        jobs = self.lock.jobs
        if not jobs:
            name = self.name
            logger.warning("%s has no plans, so that of %s is not compared: veomni lock %s", self.lock.path, name, name)
            return
        if self.name not in jobs:
            raise LockMismatchError(
                f"{self.lock.path} has no plan of {self.name}, but of {', '.join(jobs)}. Lock all of them in one call: "
                f"`veomni lock {' '.join([*jobs, self.name])}`"
            )
        key = hardware_key(plan.hardware)
        if key not in jobs[self.name]:
            raise LockMismatchError(
                f"{self.lock.path} has no plan of {self.name} for {key}, but for {', '.join(jobs[self.name])}. Lock it "
                "where it runs, or with --hardware"
            )
        before, now = jobs[self.name][key], locked_plan(plan)
        if before.sha256 != now.sha256:
            changes = _changes(before, now)
            if plan.profile_notes:  # the lock may be older than what was measured, or the other way round
                changes += plan.profile_notes
            raise mismatch(self.lock, f"the plan of {self.name} for {key}", changes)


def frozen_job(job: Path) -> FrozenJob:
    """The job in the file ``job``, in the lock file that ``VEOMNI_FROZEN`` names.

    Raises:
        LockFileError: there is no such lock file, or it is damaged.
    """
    lock = read_lock(at_home(os.environ[FROZEN].strip()))
    return FrozenJob(lock, job_key(job, lock.path))


def _changes(before: LockedPlan, now: LockedPlan) -> list[str]:
    """What runs otherwise, one sentence each."""
    moves: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for op in sorted({*before.sites, *now.sites}):
        then, here = before.sites.get(op, {}), now.sites.get(op, {})
        for path in sorted({*then, *here}):
            if then.get(path) != here.get(path):
                moves[op, then.get(path, "no site"), here.get(path, "no site")].append(path)
    changes = [f"{before.conditions} -> {now.conditions}"] if before.conditions != now.conditions else []
    changes += [
        f"{op}: {then} -> {here} at {len(paths)} site(s): {_listed(paths)}" for (op, then, here), paths in moves.items()
    ]
    for kernel in sorted(before.kernels.keys() & now.kernels.keys()):
        if before.kernels[kernel] != now.kernels[kernel]:
            changes.append(f"{kernel}: {before.kernels[kernel]} -> {now.kernels[kernel]}")
    return changes or [f"the plan's hash: {before.sha256[:12]} -> {now.sha256[:12]}"]


def _listed(paths: list[str]) -> str:
    shown = ", ".join(paths[:_NAMED])
    return f"{shown} and {len(paths) - _NAMED} more" if len(paths) > _NAMED else shown
