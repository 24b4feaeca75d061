"""A kernel that failed ``veomni verify`` here is remembered: ``auto`` passes it by, and naming it is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from models import build
from planned_norms import chosen, kernel, plan, reasons, registry
from veomni_conformance.cli import verify as command
from veomni_conformance.cli.verify_processes import CONTRACT, FAILED, OK, SKIPPED, Row
from veomni_conformance.ledger import Certificate, read_ledger, record, store
from veomni_conformance.this_machine import ThisMachine
from veomni_core import Hardware, Plan, Site, bind, build_foundation_model
from veomni_core.errors import ConformanceError, KernelUnavailableError
from veomni_tools.cli.explain import explain

ACME, PLAIN = "rms_norm/standard:acme", kernel("plain", preference=10)
REGISTRY = registry(kernel("acme", preference=60), kernel("acme", "offset", preference=60), PLAIN)
CPU = Hardware.cpu()
NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "bfloat16")
FLOAT32_NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "float32")


def checked(dtype="bfloat16", hardware=CPU, **other):
    plugin = REGISTRY.plugin("p")
    here = ThisMachine(hardware).checked(REGISTRY.resolve("rms_norm", "standard", "acme"), plugin, dtype)
    return replace(here, **other)


def planned(value="auto", sites=(NORM,), hardware=CPU):
    return plan(value, sites, hardware, REGISTRY)


def test_auto_passes_it_by_and_says_so_everywhere():
    assert chosen(planned()) == ["acme"]
    record([], {checked(): "sample 'odd width': the result is off"})
    result = planned()
    assert chosen(result) == ["plain"]
    (why,) = reasons(result)
    assert why.startswith("the only one usable here, after: acme failed veomni verify in bfloat16 on ")
    assert "the result is off (veomni verify veomni-p --kernel rms_norm/standard:acme checks it again)" in why
    assert f"passed by: {ACME} failed veomni verify" in result.table()
    assert Plan.from_json(result.to_json()) == result
    assert json.loads(result.to_json())["passed_by"] == list(result.passed_by) and len(result.passed_by) == 1


def test_naming_it_is_an_error_that_says_how_to_verify_again():
    record([], {checked(): "off"})
    with pytest.raises(KernelUnavailableError, match=r"acme failed veomni verify in bfloat16.*checks it again"):
        planned("acme")
    assert chosen(planned(["acme", "plain"])) == ["plain"]


def test_a_pass_forgets_the_failure():
    record([], {checked(): "off", checked("float32"): "off"})
    record([Certificate.of_today(checked(), {"odd": (0.5, 0.1)})], {})
    assert chosen(planned("acme")) == ["acme"] and not planned().passed_by
    assert chosen(planned(sites=(FLOAT32_NORM,))) == ["plain"]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"version": "1.3"},
        {"distribution": "veomni-q"},
        {"hardware": Hardware("cuda", 90, "NVIDIA H200", detected=True)},
        {"kernel": "rms_norm/offset:acme"},
    ],
    ids=str,
)
def test_a_failure_of_something_else_changes_nothing(other):
    before = planned()
    record([], {checked(**other): "off"})
    assert planned() == before


def test_other_versions_of_torch_and_triton_count_as_another_machine(monkeypatch):
    record([], {checked(): "off"})
    monkeypatch.setattr("veomni_conformance.this_machine.installed_version", lambda distribution: "99")
    assert chosen(planned()) == ["acme"]


def test_a_machine_that_is_not_here_has_no_memory():
    record([], {checked(hardware=Hardware.named("cpu")): "off"})
    assert chosen(plan("auto", (NORM,), Hardware("cpu", name="CPU"), REGISTRY)) == ["acme"]


def test_what_runs_and_its_hash_do_not_depend_on_when_it_failed():
    record([], {checked(): "off"})
    first = planned()
    text = store().read_text().replace(first.passed_by[0].split(" on ")[1][:10], "2020-01-01")
    store().write_text(text)
    assert planned().sha256 == first.sha256 and planned() != first


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"failed": [{"checked": {}, "date": 1, "reason": 2}]}'])
def test_a_damaged_file_is_one_warning_and_the_next_failure_replaces_it(text, caplog):
    store().parent.mkdir(parents=True)
    store().write_text(text)
    assert chosen(planned()) == ["acme"] and chosen(planned()) == ["acme"]
    assert [f"{store()} can't be read" in record.getMessage() for record in caplog.records] == [True]
    record([], {checked(): "off"})
    assert chosen(planned()) == ["plain"]


def test_a_place_that_can_not_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VEOMNI_CACHE", str(tmp_path / "file" / "cache"))
    record([], {checked(): "off"})
    assert any("can't be written" in record.getMessage() for record in caplog.records)
    assert chosen(planned()) == ["acme"]


def test_the_file_is_in_the_users_cache_and_nothing_lies_beside_it(monkeypatch, tmp_path):
    monkeypatch.delenv("VEOMNI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record([], {checked(): "off"})
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")] == [Path("veomni/checked_kernels.json")]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store() == tmp_path / "home" / ".cache" / "veomni" / "checked_kernels.json"


def test_the_command_remembers_what_failed_and_forgets_what_passed(monkeypatch):
    record, results = REGISTRY.plugin("p"), {"bfloat16": FAILED, "float32": CONTRACT, "float16": SKIPPED}

    def verified():
        rows = [
            Row(ACME, dtype, result, ("off", "and more"), cases={"odd": (0.5, 0.1)})
            for dtype, result in results.items()
        ]
        command.keep_results(rows, record, CPU)
        return {failure.checked.dtype: failure.reason for failure in read_ledger()[1]}

    assert verified() == {"bfloat16": "off"}
    results["bfloat16"] = SKIPPED
    assert verified() == {"bfloat16": "off"}
    results["bfloat16"] = OK
    assert verified() == {}


def test_explain_and_the_receipt_show_it(capsys, registry):
    spec = registry.resolve("rms_norm", "standard", "torch")
    plugin = registry.plugin_of(spec)
    failed = ThisMachine(registry.detect_hardware()).checked(spec, plugin, "float32")
    record([], {failed: "off"})
    explain("rms_norm")
    assert "failed veomni verify in float32" in " ".join(capsys.readouterr().out.split())
    explain("rms_norm", json=True)
    (row,) = [
        each
        for each in json.loads(capsys.readouterr().out)["kernels"]
        if (each["kernel"], each["variant"]) == ("torch", "standard")
    ]
    assert row["runs"] and "failed veomni verify in float32" in row["failed_verify"][0]
    receipt = bind(build("llama"), {"preset": "eager", "rms_norm_implementation": "auto"}, registry=registry).receipt
    assert f"Passed by: {spec} failed veomni verify in float32" in receipt.table()
    assert len(receipt.to_dict()["passed_by"]) == 1


def test_a_model_is_built_verified_or_not_at_all(monkeypatch):
    def wrong(x, weight, eps):
        return x * weight

    monkeypatch.setattr("veomni_torch.rms_norm.standard", wrong)
    ops = {"preset": "eager", "rms_norm_implementation": "torch"}
    config = build("llama").config
    options = {"ops_implementation": ops, "torch_dtype": "float32", "init_device": "cpu"}
    build_foundation_model(config, **options)
    with pytest.raises(ConformanceError, match="rms_norm/standard:torch on cpu in float32 breaks its contract"):
        build_foundation_model(config, **options, verify=True)


def test_no_test_sees_the_developers_own_file():
    assert "veomni-cache-" in os.environ["VEOMNI_CACHE"]
