"""A kernel that was wrong on some machines is chosen there only where it has passed its contract on the device."""

from __future__ import annotations

import json

import pytest

from planned_norms import chosen, kernel, plan, reasons, registry
from veomni_conformance.cli import verify as command
from veomni_conformance.cli.verify_processes import EXPECTED, FAILED, OK, Row
from veomni_core import Hardware, HardwareRequirement, Plan, Site, Suspicion
from veomni_core.binding.application import refuse_unverified
from veomni_core.errors import KernelUnavailableError, SpecError

CPU, HERE = Hardware.cpu(), Hardware("cuda", 90, name="NVIDIA H200", detected=True)
NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "bfloat16")
PLAIN = kernel("plain", preference=10)
NAME = "rms_norm/standard:acme"
WRONG = "its gradients were off by half with Triton 3.4 to 3.7.0"
HOPPER = HardwareRequirement(
    "cuda", min_compute_capability=90, max_compute_capability=90, packages=("triton>=3.4,<3.7.1",)
)


def suspected(where):
    return registry(kernel("acme", preference=60, suspicions=(Suspicion(where, WRONG),)), PLAIN)


ANYWHERE = suspected(HardwareRequirement())


def planned(value="auto", registry=ANYWHERE, hardware=CPU):
    return plan(value, (NORM,), hardware, registry)


def verified(result, hardware=CPU, registry=ANYWHERE):
    row = Row(NAME, "bfloat16", result, ("the gradient of x is off by 0.54",), cases={"odd": (0.5, 0.1)})
    command.keep_results([row], registry.plugin("p"), hardware)


@pytest.fixture
def triton(monkeypatch):
    """A function that sets which Triton seems to be installed."""

    def installed(version):
        monkeypatch.setattr("veomni_core.descriptions.hardware._installed_version", lambda name: version)

    return installed


def test_it_waits_for_its_check_and_the_fault_is_named():
    waiting = planned()
    assert chosen(waiting) == ["plain"]
    assert f"acme has not passed veomni verify in bfloat16 here, and {WRONG}" in reasons(waiting)[0]
    assert f"passed by: {NAME} has not passed" in waiting.table()
    with pytest.raises(KernelUnavailableError, match=f"veomni verify veomni-p --kernel {NAME} checks it"):
        planned("acme")


def test_a_pass_lets_it_run_and_a_failure_says_with_which_numbers():
    verified(OK)
    assert chosen(planned()) == chosen(planned("acme")) == ["acme"]
    verified(FAILED)
    result = planned()
    assert chosen(result) == ["plain"] and "the gradient of x is off by 0.54" in reasons(result)[0]


def test_a_suspicion_of_an_older_plan_is_read():
    written = {"where": {"device_type": "cuda"}, "why": WRONG}
    assert Suspicion.from_dict(written) == Suspicion(HardwareRequirement("cuda"), WRONG)


@pytest.mark.parametrize("seen, result", [(True, EXPECTED), (False, FAILED)])
def test_where_the_fault_was_seen_a_failure_is_expected_and_remembered(seen, result):
    there = Suspicion(HardwareRequirement(), WRONG, seen=seen)
    of = registry(kernel("acme", preference=60, suspicions=(there,)), PLAIN)
    (spec,) = (each for each in of.plugin("p").kernels if str(each) == NAME)
    compared = Row(NAME, "bfloat16", FAILED, ("the gradient of x is off by 0.54",), cases={"odd": (0.5, 5.4)})
    row = command.as_expected(compared, spec, CPU)
    assert row.result == result
    assert (row.detail[1:] == (f"stays refused on this machine: {WRONG}",)) == seen
    command.keep_results([row], of.plugin("p"), CPU)
    assert "the gradient of x is off by 0.54" in reasons(planned(registry=of))[0]
    for other in (Row(NAME, "bfloat16", OK), Row(NAME, "bfloat16", FAILED, ("did not end within 200 s",))):
        assert command.as_expected(other, spec, CPU) == other


@pytest.mark.parametrize("version, waits", [("3.3.1", False), ("3.4.0", True), ("3.7.0", True), ("3.7.1", False)])
def test_versions_decide_who_is_asked(version, waits, triton):
    triton(version)
    assert chosen(planned(registry=suspected(HOPPER), hardware=HERE)) == (["plain"] if waits else ["acme"])


def test_what_was_not_seen_to_be_wrong_is_not_asked(triton):
    triton("3.6.0")
    assert chosen(planned(registry=suspected(HOPPER))) == ["acme"]
    ampere = Hardware("cuda", 80, name="NVIDIA A100", detected=True)
    assert chosen(planned(registry=suspected(HOPPER), hardware=ampere)) == ["acme"]


def test_a_plan_for_hardware_that_is_not_here_assumes_the_pass():
    result = planned(registry=suspected(HOPPER), hardware="h200")
    assert chosen(result) == ["acme"] and f"{NAME}: has passed veomni verify" in result.assumptions
    assert not planned(registry=suspected(HOPPER), hardware="a100").assumptions


def test_a_plan_from_elsewhere_is_asked_again_where_it_is_applied(triton, monkeypatch):
    triton("3.6.0")
    there = suspected(HOPPER)
    foreign = Plan.from_json(planned(registry=there, hardware="h200").to_json())
    assert foreign.kernels[0].spec == there.kernels("rms_norm", "standard")[0]
    monkeypatch.setattr(type(there), "detect_hardware", lambda self, device_type=None: HERE)
    with pytest.raises(KernelUnavailableError, match=WRONG):
        refuse_unverified(foreign, there)
    verified(OK, HERE, there)
    refuse_unverified(foreign, there)
    triton("3.8.0")
    refuse_unverified(foreign, there)


def test_a_plan_that_was_written_before_there_were_suspicions_is_read():
    data = json.loads(planned("plain").to_json())
    del data["kernels"][0]["spec"]["suspicions"]
    assert Plan.from_json(json.dumps(data)).kernels[0].spec == PLAIN


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: Suspicion("hopper", WRONG), "where must be a HardwareRequirement"),
        (lambda: Suspicion(HOPPER, ""), "why must be a non-empty string"),
        (lambda: Suspicion.from_dict({"where": {}}), "expected a mapping of where, why"),
        (lambda: kernel("acme", suspicions=(HOPPER,)), "suspicions must be"),
    ],
)
def test_a_suspicion_that_says_nothing_is_refused(wrong, message):
    with pytest.raises(SpecError, match=message):
        wrong()
