"""A profile decides where it holds: not for other shapes or devices, nor for what is not certified."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from measured_norms import (
    ACME,
    BY_RANK,
    CPU,
    H200,
    JOB,
    NORM,
    OWN,
    PLAIN,
    SHY,
    certify,
    checked,
    chosen,
    contender,
    measured,
    planned,
    reason,
    times,
)

from veomni_conformance.ledger import record
from veomni_conformance.ranks import agreement
from veomni_conformance.this_machine import ThisMachine
from veomni_core import Plan
from veomni_core.errors import HostError, LockMismatchError
from veomni_tools.locks.lock_file import Lock
from veomni_tools.locks.locked_plans import FrozenJob, hardware_key, locked_plan
from veomni_tools.profiles import measured_job
from veomni_tools.profiles.measured_job import MeasuredJob, MeasuredOn
from veomni_tools.profiles.profile import Contender, Times, best, shown_ms
from veomni_tools.profiles.profile_store import profile_file, read_profile, write_profile
from veomni_tools.profiles.site_kind import SiteKind


def config_of(**settings):
    return SimpleNamespace(model_type="llama", to_dict=lambda: {"hidden_size": 64, **settings})


def test_nothing_is_otherwise_where_nothing_was_measured():
    certify(ACME, PLAIN)
    plan = planned()
    assert (chosen(plan), reason(plan), plan.profile, plan.profile_notes) == ("acme", BY_RANK, "", ())


def test_auto_goes_by_it_and_says_the_figures():
    certify(ACME, PLAIN)
    profile = measured(contender(ACME, 1.403), contender(PLAIN, 1.23), OWN)
    plan = planned()
    assert chosen(plan) == "plain"
    figures = f"chosen by measurement: plain 1.23 ms, acme 1.40 ms, eager 5.00 ms (profile {profile.digest})"
    assert reason(plan) == figures
    (note,) = plan.profile_notes
    assert note == f"by measurement: profile {profile.digest} of 2026-11-24 ({profile_file(JOB, 'cpu (CPU)')})"
    assert Plan.from_json(plan.to_json()) == plan
    assert chosen(planned("acme")) == "acme"  # what a config names is not measured away


def test_the_model_s_own_code_may_win():
    certify(ACME, PLAIN)
    measured(contender(ACME, 6.0), contender(PLAIN, 7.0), OWN)
    plan = planned()
    assert chosen(plan) == "eager" and reason(plan).startswith("chosen by measurement: eager 5.00 ms, acme 6.00 ms")
    set_to = replace(NORM, own="sdpa")
    measured(contender(ACME, 6.0), contender(PLAIN, 7.0), OWN, kind=SiteKind.of(set_to, ("bfloat16",)))
    assert reason(planned(sites=(set_to,))).startswith("chosen by measurement: eager (sdpa) 5.00 ms")


def test_a_tie_goes_to_the_lower_memory_and_says_so():
    certify(ACME, PLAIN)
    measured(contender(ACME, 1.40, memory=2**20, spread=0.2), contender(PLAIN, 1.23, memory=3 * 2**20), OWN)
    plan = planned()
    assert chosen(plan) == "acme"
    assert "acme 1.40 ms in 1.0 MiB, within the spread of plain 1.23 ms in 3.0 MiB, eager 5.00 ms" in reason(plan)


def test_a_kernel_that_auto_never_takes_is_not_taken_for_its_times():
    certify(ACME, PLAIN, SHY)
    measured(contender(SHY, 0.1), contender(ACME, 2.0), contender(PLAIN, 1.0), OWN)
    assert chosen(planned()) == "plain"


def test_the_times_of_a_kernel_that_failed_verification_count_for_nothing():
    certify(ACME, PLAIN)
    measured(contender(ACME, 1.0), contender(PLAIN, 2.0), OWN)
    assert chosen(planned()) == "acme"
    record([], {checked(ACME): "sample 'odd width': the result is off"})
    plan = planned()
    assert chosen(plan) == "plain" and "after: acme failed veomni verify" in reason(plan)


def test_other_shapes_fall_back_to_ranks_and_the_plan_says_so():
    certify(ACME, PLAIN)
    profile = measured(contender(ACME, 2.0), contender(PLAIN, 1.0), OWN)
    other = planned(job=replace(JOB, batch=(2, 128), autocast="bfloat16"))
    assert reason(other) == (
        f"{BY_RANK}; not measured for 2 x 128 tokens, autocast to bfloat16 on cpu (CPU), but for 4 x 128 tokens on "
        "cpu (CPU)"
    )
    wider = replace(NORM, sizes={"width": (128,)})
    assert reason(planned(sites=(wider,))) == (
        f"{BY_RANK}; not measured: profile {profile.digest} has no times of such a site"
    )
    assert reason(planned(job=replace(JOB, model="1" * 64))) == BY_RANK
    assert reason(planned(job=None)) == BY_RANK


def test_another_device_has_a_profile_of_its_own():
    measured(contender(ACME, 2.0), contender(PLAIN, 1.0), OWN)
    certify(ACME, PLAIN, hardware=H200)
    assert chosen(planned(hardware=H200)) == "acme"
    assert "not measured for 4 x 128 tokens on cuda 9.0 (NVIDIA H200), but for" in reason(planned(hardware=H200))
    measured(contender(ACME, 2.0, hardware=H200), contender(PLAIN, 1.0, hardware=H200), OWN, hardware=H200)
    assert chosen(planned(hardware=H200)) == "plain"
    assert reason(planned(hardware="h200")) == BY_RANK  # named, and not here
    assert "chosen by measurement" not in reason(planned(hardware=H200, training=False))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "job": 3}', '{"format": 1, "job": {}}']
)
def test_a_damaged_profile_ends_planning_with_its_path(text):
    path = write_profile(measured(OWN))
    path.write_text(text)
    with pytest.raises(HostError, match=r"llama-0{12}-\w+\.json is no profile of veomni tune, or is damaged.*Remove"):
        planned()
    with pytest.raises(HostError, match="is no profile"):  # as one of the same model's
        planned(job=replace(JOB, batch=(1, 1)))


def test_a_profile_is_what_was_written():
    profile = measured(contender(ACME, 2.0), Contender("plain", why_not="out of memory"), OWN)
    assert read_profile(profile_file(JOB, "cpu (CPU)")) == profile
    assert read_profile(profile_file(replace(JOB, batch=(1, 1)), "cpu (CPU)")) is None


def test_a_profile_that_can_t_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("VEOMNI_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HostError, match="can't be written.*Set VEOMNI_CACHE"):
        measured(OWN)


def test_what_says_nothing_of_shapes_is_not_in_the_key():
    model = SimpleNamespace(config=config_of())
    same = SimpleNamespace(config=config_of(transformers_version="9", dtype="float32", use_cache=True))
    wider = SimpleNamespace(config=config_of(intermediate_size=3))
    jobs = [MeasuredJob.of(each, (4, 128), None) for each in (model, same, wider)]
    assert jobs[0] == jobs[1] and jobs[0].model != jobs[2].model
    assert str(jobs[0]) == "llama, 4 x 128 tokens"


def test_plans_that_differ_by_their_profiles_say_so():
    certify(ACME, PLAIN)
    by_rank = planned()
    profile = measured(contender(ACME, 2.0), contender(PLAIN, 1.0), OWN)
    by_measurement = planned()
    assert by_rank.diff(by_measurement) == (
        "rms_norm: acme -> plain at 1 site(s): model.layers.3.norm",
        f"auto went by profile: none -> {profile.digest}",
    )
    said = agreement._differences({0: by_rank, 1: by_measurement})  # what all ranks of a job end with
    assert f"rank 1: auto went by profile: none -> {profile.digest}" in said
    measured(contender(ACME, 3.0), contender(PLAIN, 1.0), OWN)
    assert by_measurement.diff(planned()) == () and by_measurement.sha256 == planned().sha256


def test_a_locked_plan_that_a_profile_changes_is_refused_and_the_profile_is_named(tmp_path):
    certify(ACME, PLAIN)
    before = planned()
    lock = Lock((), {"job.yaml": {hardware_key(CPU): locked_plan(before)}}, tmp_path / "veomni.lock")
    frozen = FrozenJob(lock, "job.yaml")
    frozen.check(before)
    profile = measured(contender(ACME, 2.0), contender(PLAIN, 1.0), OWN)
    with pytest.raises(LockMismatchError, match=f"by measurement: profile {profile.digest}") as raised:
        frozen.check(planned())
    assert "rms_norm/standard: acme -> plain at 1 site(s)" in str(raised.value)


def test_the_processor_is_read_where_kernels_run_on_it(monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A Fast CPU\n")
    monkeypatch.setattr(measured_job, "_CPUINFO", file)
    assert MeasuredOn.here(ThisMachine(CPU)).processor == "A Fast CPU"
    assert MeasuredOn.here(ThisMachine(H200)).processor == ""
    monkeypatch.setattr(measured_job, "_CPUINFO", tmp_path / "none")
    assert MeasuredOn.here(ThisMachine(CPU)).processor


@pytest.mark.parametrize("bad", [(1.0, 2.0, 3.0), (1.0, 0.5, 0.9), (0.0, 0.0, 0.0), (1.0, 1.0, float("inf"))])
def test_times_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match="times must rise"):
        Times(*bad)


def test_a_contender_has_times_or_a_reason():
    for bad in ({}, {"times": times(1.0), "why_not": "out of memory"}):
        with pytest.raises(ValueError, match="must have times, or why there are none"):
            Contender("acme", **bad)
    assert best([OWN]) is OWN
    assert [shown_ms(each) for each in (0.5, 12.345, 123.45)] == ["0.500 ms", "12.3 ms", "123 ms"]
