"""Foreign code, which has a digest, is chosen only where it is certified with this digest."""

from __future__ import annotations

import json

import pytest

from planned_norms import HOPPER, chosen, kernel, plan, reasons, registry
from veomni_conformance.cli import verify as command
from veomni_conformance.cli.verify_processes import CONTRACT, FAILED, OK, Row
from veomni_conformance.ledger import read_ledger
from veomni_core import Hardware, Site
from veomni_core.errors import KernelUnavailableError, SpecError
from veomni_tools.cli import explain as explain_command

CPU = Hardware.cpu()
NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "bfloat16")
PLAIN = kernel("plain", preference=10)
FOREIGN = registry(kernel("acme", preference=60, digest="a" * 64), PLAIN)
NAME = "rms_norm/standard:acme"


def planned(value="auto", registry=FOREIGN):
    return plan(value, (NORM,), CPU, registry)


def verified(result=OK, dtype="bfloat16", registry=FOREIGN):
    command.keep_results([Row(NAME, dtype, result, ("off",), cases={"odd": (0.5, 0.1)})], registry.plugin("p"), CPU)


def test_it_waits_for_its_check_and_plan_and_error_say_so():
    waiting = planned()
    assert chosen(waiting) == ["plain"]
    assert "acme has not passed veomni verify in bfloat16 here" in reasons(waiting)[0]
    assert waiting.passed_by and "passed by: rms_norm/standard:acme has not passed" in waiting.table()
    with pytest.raises(
        KernelUnavailableError, match=r"veomni verify veomni-p --kernel rms_norm/standard:acme checks it"
    ):
        planned("acme")
    verified()
    assert chosen(planned()) == chosen(planned("acme")) == ["acme"] and not planned().passed_by


def test_a_failure_takes_the_pass_back_and_a_contract_s_failure_does_not():
    verified()
    verified(CONTRACT)
    assert chosen(planned()) == ["acme"]
    verified(FAILED)
    assert "failed veomni verify" in reasons(planned())[0] and not read_ledger()[0]
    verified(OK)
    assert chosen(planned()) == ["acme"] and not read_ledger()[1]


@pytest.mark.parametrize(
    "other",
    [{"dtype": "float32"}, {"registry": registry(kernel("acme", preference=60, digest="b" * 64), PLAIN)}],
    ids=["dtype", "digest"],
)
def test_a_pass_of_something_else_does_not_count(other):
    verified(**other)
    assert chosen(planned()) == ["plain"]


def test_a_failure_of_other_code_does_not_count_either():
    verified(FAILED)
    assert "failed veomni verify" in reasons(planned())[0]
    other = registry(kernel("acme", preference=60, digest="b" * 64), PLAIN)
    assert "has not passed veomni verify" in reasons(planned(registry=other))[0]


def test_a_kernel_that_can_not_run_here_is_not_asked_for_its_check():
    far = registry(kernel("acme", preference=60, digest="a" * 64, hardware=HOPPER), PLAIN)
    result = planned(registry=far)
    assert chosen(result) == ["plain"] and result.passed_by == () and "veomni verify" not in reasons(result)[0]
    with pytest.raises(KernelUnavailableError) as error:
        planned("acme", registry=far)
    assert "needs device type cuda" in str(error.value) and "veomni verify" not in str(error.value)


def test_explain_shows_it(monkeypatch, capsys):
    monkeypatch.setattr(explain_command, "discover", lambda: FOREIGN)
    monkeypatch.setattr(type(FOREIGN), "detect_hardware", lambda self, device_type=None: CPU)

    def row():
        explain_command.explain("rms_norm", None, True)
        return next(row for row in json.loads(capsys.readouterr().out)["kernels"] if row["kernel"] == "acme")

    assert not row()["runs"] and "has not passed" in row()["unverified"][0]
    verified()
    assert row()["runs"] and "in float32, float16 here" in row()["unverified"][0]
    explain_command.explain("rms_norm", None, False)
    assert "yes; has not passed veomni verify in float32" in " ".join(capsys.readouterr().out.split())


def test_a_digest_is_text():
    with pytest.raises(SpecError, match="digest must be a string"):
        kernel("acme", digest=3)
