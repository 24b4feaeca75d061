"""A profile is stale where what it measured has changed: the plan goes by ranks, and says why."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
from measured_norms import ACME, BY_RANK, CPU, OWN, PLAIN, certify, chosen, contender, measured, planned, reason

from veomni_conformance.this_machine import ThisMachine
from veomni_tools.profiles.measured_job import MeasuredOn
from veomni_tools.profiles.profile import Contender


def test_a_kernel_whose_certificate_is_gone_makes_it_stale():
    certify(ACME)
    profile = measured(contender(ACME, 2.0), contender(PLAIN, 1.0), OWN)
    plan = planned()
    assert chosen(plan) == "acme"
    stale = f"not by profile {profile.digest}, which is stale: rms_norm/standard:plain is no longer certified here"
    assert reason(plan) == f"{BY_RANK}; {stale}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"packages": ("torch 2.1.0", "triton 3.5.0")}, "torch 2.1.0 (here "),
        ({"processor": "Another CPU"}, "Another CPU (here "),
        ({"driver": "CUDA 13.0, driver 570.1"}, "CUDA 13.0, driver 570.1 (here none)"),
    ],
    ids=str,
)
def test_a_profile_of_another_machine_or_other_versions_is_stale(change, words):
    certify(ACME, PLAIN)
    here = MeasuredOn.here(ThisMachine(CPU))
    profile = measured(contender(ACME, 2.0), contender(PLAIN, 1.0), OWN, machine=replace(here, **change))
    plan = planned()
    assert chosen(plan) == "acme" and plan.profile == ""
    assert f"{BY_RANK}; not by profile {profile.digest}, which is stale: " in reason(plan) and words in reason(plan)
    (note,) = plan.profile_notes
    assert note.startswith(f"stale, not used: profile {profile.digest} of 2026-11-24 (") and words in note
    assert note in plan.table()


def test_a_package_that_was_not_there_makes_it_stale(monkeypatch):
    certify(ACME, PLAIN)
    here = MeasuredOn.here(ThisMachine(CPU))
    fewer = replace(here, packages=tuple(each for each in here.packages if not each.startswith("torch ")))
    measured(contender(ACME, 2.0), contender(PLAIN, 1.0), OWN, machine=fewer)
    assert f"torch {importlib.metadata.version('torch')}, which was not there" in reason(planned())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", "1.1", "veomni-p 1.1 (here 1.2)"),
        ("files", "0" * 64, "other files of veomni-p 1.2"),
        ("dtype", "float32", "rms_norm/standard:plain was measured in other dtypes"),
    ],
)
def test_another_version_of_a_plugin_makes_what_was_measured_of_it_stale(field, value, words):
    certify(ACME, PLAIN)
    older = contender(PLAIN, 1.0)
    older = replace(older, checked=(replace(older.checked[0], **{field: value}),))
    measured(contender(ACME, 2.0), older, OWN)
    assert chosen(planned()) == "acme" and words in reason(planned())


def test_a_kernel_that_came_later_makes_it_stale():
    certify(ACME, PLAIN)
    measured(contender(PLAIN, 1.0), OWN)
    assert chosen(planned()) == "acme" and "rms_norm/standard:acme was not there" in reason(planned())


def test_a_kernel_that_was_not_certified_then_counts_once_it_is():
    certify(PLAIN)
    measured(Contender("acme", why_not="failed its check in bfloat16: off"), contender(PLAIN, 1.0), OWN)
    assert chosen(planned()) == "plain"
    certify(ACME)
    assert chosen(planned()) == "acme" and "acme was not certified, and is now" in reason(planned())
