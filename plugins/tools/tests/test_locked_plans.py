"""A plan that differs from the lock file's is refused: its sites, its kernels' versions, its job and its hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from veomni_core.discovery.registry import Registry
from veomni_core.errors import LockMismatchError
from veomni_core.planning.plan import Plan
from veomni_core.planning.planner import plan_sites
from veomni_core.sites.site import Site
from veomni_tools.locks.lock_file import Lock
from veomni_tools.locks.locked_plans import FrozenJob, hardware_key, job_key, locked_plan


def planned(registry: Registry, hardware: str, kernel: str, count: int = 7) -> Plan:
    sites = [Site("rms_norm", f"norms.{i}", "norm modules", "standard", "proven") for i in range(count)]
    return plan_sites(
        sites, {"preset": "eager", "rms_norm_implementation": kernel}, hardware=hardware, registry=registry
    )


def test_a_plan_of_other_kernels_is_refused_with_its_sites(registry: Registry) -> None:
    before, now = (planned(registry, "h200", kernel) for kernel in ("torch", "eager"))
    lock = Lock({}, {"job.yaml": {hardware_key(before.hardware): locked_plan(before)}})
    job = FrozenJob(lock, "job.yaml")
    job.check(before)
    job.check(planned(registry, "h100", "torch"))  # the same kind of hardware
    with pytest.raises(LockMismatchError) as caught:
        job.check(now)
    assert "the plan of job.yaml for cuda 9.0 differs from veomni.lock" in str(caught.value)
    assert (
        "rms_norm/standard: torch -> eager at 7 site(s): norms.0, norms.1, norms.2, norms.3, norms.4 and 2 more"
        in str(caught.value)
    )
    with pytest.raises(LockMismatchError, match=r"no site -> torch at 1 site\(s\): norms\.7"):
        job.check(planned(registry, "h200", "torch", count=8))
    with pytest.raises(LockMismatchError, match="no autocast, for training -> autocast to bfloat16, for training"):
        job.check(replace(before, autocast="bfloat16"))


def test_the_same_kernels_of_another_version_are_named(registry: Registry) -> None:
    before = planned(registry, "h200", "torch")
    newer = tuple(replace(kernel, version="9.9") for kernel in before.kernels)
    job = FrozenJob(Lock({}, {"job.yaml": {"cuda 9.0": locked_plan(before)}}), "job.yaml")
    with pytest.raises(LockMismatchError, match=r"rms_norm/standard:torch: .* of veomni-torch 9\.9"):
        job.check(replace(before, kernels=newer))


def test_a_job_or_hardware_that_was_not_locked_is_refused(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(registry, "h200", "torch")
    lock = Lock({}, {"job.yaml": {"cuda 9.0": locked_plan(plan)}})
    with pytest.raises(LockMismatchError, match=r"no plan of other\.yaml, but of job\.yaml"):
        FrozenJob(lock, "other.yaml").check(plan)
    with pytest.raises(LockMismatchError, match=r"no plan of job\.yaml for cuda 8\.0, but for cuda 9\.0"):
        FrozenJob(lock, "job.yaml").check(planned(registry, "a100", "torch"))
    FrozenJob(Lock({}), "job.yaml").check(plan)
    assert "has no plans, so that of job.yaml is not compared" in caplog.text


def test_sites_that_differ_in_their_rule_alone_are_both_in_the_lock(registry: Registry) -> None:
    sites = [Site("rms_norm", "norm", rule, "standard", "proven") for rule in ("one rule", "another")]
    locked = locked_plan(plan_sites(sites, {"preset": "eager"}, hardware="h200", registry=registry))
    assert locked.sites == {"rms_norm/standard": {"norm": "eager", "norm (one rule)": "eager"}}


def test_a_job_is_named_by_its_path_from_the_lock_file(tmp_path: Path) -> None:
    assert job_key(tmp_path / "jobs" / "a.yaml", tmp_path / "veomni.lock") == "jobs/a.yaml"
    assert job_key(tmp_path / "a.yaml", tmp_path / "locks" / "veomni.lock") == "../a.yaml"
