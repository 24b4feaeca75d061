"""Certificates: what passed, where, how close to its tolerance; and ``require: verified``, which asks for them."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed import run_ranks
from planned_norms import chosen, kernel, plan, reasons, registry
from veomni_conformance.cli import verify as command
from veomni_conformance.cli.verify_processes import FAILED, OK, Row
from veomni_conformance.ledger import (
    HERE,
    NEVER,
    Certificate,
    Ledger,
    read_certificates,
    read_ledger,
    record,
    store,
    write_certificates,
)
from veomni_conformance.this_machine import CheckedKernel, ThisMachine, installed_version
from veomni_core import Hardware, OpsConfig, Plan, Site
from veomni_core.errors import KernelUnavailableError, UnknownNameError

CPU = Hardware.cpu()
H200 = Hardware("cuda", 90, "NVIDIA H200", detected=True)
NORM = Site("rms_norm", "layers.0.norm", "norm modules", "standard", "proven", "bfloat16")
REGISTRY = registry(kernel("acme", preference=60), kernel("plain", preference=10))
ACME, PLAIN = (REGISTRY.resolve("rms_norm", "standard", name) for name in ("acme", "plain"))
PLUGIN = REGISTRY.plugin("p")
CASES = {"odd width": (0.25, 0.5), "no rows (refused)": (0.0, 0.0)}


def verified(name="acme", result=OK, dtype="bfloat16"):
    row = Row(f"rms_norm/standard:{name}", dtype, result, ("the result is off",), cases=CASES)
    return command.keep_results([row], PLUGIN, CPU)


def planned(value="auto", **more):
    return plan(value, (NORM,), CPU, REGISTRY, **{"require": "verified", **more})


def standing(hardware=CPU, dtypes=("bfloat16",)):
    return Ledger.here(hardware).standing(ACME, PLUGIN, dtypes)


def test_a_job_that_requires_it_gets_certified_kernels_alone_and_says_why():
    waiting = planned()
    assert chosen(waiting) == ["eager"]
    assert (
        "acme has not passed veomni verify in bfloat16 here, and require: verified asks for that" in reasons(waiting)[0]
    )
    assert len(waiting.passed_by) == 2
    verified("plain")
    assert chosen(planned()) == ["plain"] and "after: acme has not passed" in reasons(planned())[0]
    verified()
    assert chosen(planned()) == chosen(planned("acme")) == ["acme"] and not planned().passed_by


def test_naming_one_that_is_not_certified_is_an_error_with_the_command():
    verified(dtype="float32")
    with pytest.raises(KernelUnavailableError, match=r"in bfloat16 here.*\(veomni verify veomni-p --kernel rms_norm/s"):
        planned("acme")
    assert chosen(planned("acme", require="nothing")) == ["acme"]


def test_every_plan_says_how_its_kernels_stand():
    first = planned(require="nothing")
    assert f"{NEVER}: rms_norm/standard:acme" in first.table()
    verified()
    second = planned(require="nothing")
    assert f"{HERE}: rms_norm/standard:acme" in second.table()
    assert [planned_kernel.standing for planned_kernel in second.kernels] == [HERE]
    assert Plan.from_json(second.to_json()) == second and second.sha256 == first.sha256
    elsewhere = plan("acme", (NORM,), "a100", REGISTRY, require="verified")
    assert [each.standing for each in elsewhere.kernels] == [""]
    assert "rms_norm/standard:acme: has passed veomni verify" in elsewhere.assumptions


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("packages", ("torch 2.12.0",), "torch 2.12.0 (here "),
        ("packages", ("torch 2.13.0", "triton 3.5.0"), "triton 3.5.0 (here "),
        ("packages", ("torch 2.13.0", "triton 3.6.0", "veomni-ops 0.1"), "veomni-ops 0.1 (here 0.2)"),
        ("version", "1.1", "veomni-p 1.1 (here 1.2)"),
        ("files", "0" * 64, "other files of veomni-p 1.2"),
        ("hardware", "cuda 9.0 (NVIDIA H100)", "cuda 9.0 (NVIDIA H100)"),
        ("driver", "CUDA 13.0, driver 570.1", "CUDA 13.0, driver 570.1 (here none)"),
    ],
)
def test_what_is_otherwise_makes_it_verified_elsewhere(field, value, words, monkeypatch):
    versions = {"torch": "2.13.0", "triton": "3.6.0", "veomni-conformance": "0.2", "veomni-ops": "0.2"}
    monkeypatch.setattr("veomni_conformance.this_machine.installed_version", versions.__getitem__)
    (certificate,) = verified()
    assert standing() == HERE
    other = replace(certificate, checked=replace(certificate.checked, **{field: value}))
    store().unlink()
    record([other], {})
    assert standing().startswith("verified elsewhere: ") and words in standing()
    with pytest.raises(KernelUnavailableError, match="has not passed veomni verify in bfloat16 here, and was verified"):
        planned("acme")


def test_another_dtype_or_kernel_is_no_certificate():
    verified(dtype="float32")
    verified("plain")
    assert standing() == NEVER and standing(dtypes=("float32",)) == HERE
    assert standing(dtypes=("float32", "bfloat16")) == NEVER  # the worst decides


def test_what_a_compiler_broke_is_caught(monkeypatch):
    """As when a release of Triton compiled a right kernel to a wrong one on one GPU: certified before, not after."""
    triton = {"version": "3.2.0"}
    found = installed_version
    monkeypatch.setattr(
        "veomni_conformance.this_machine.installed_version",
        lambda name: triton["version"] if name == "triton" else found(name),
    )
    verified()
    assert chosen(planned("acme")) == ["acme"]
    triton["version"] = "3.3.0"
    with pytest.raises(KernelUnavailableError, match=r"verified elsewhere: triton 3\.2\.0 \(here 3\.3\.0\)"):
        planned("acme")
    verified(result=FAILED)
    with pytest.raises(KernelUnavailableError, match="acme failed veomni verify in bfloat16"):
        planned("acme", require="nothing")
    triton["version"] = "3.2.0"  # back to what it was certified with
    assert chosen(planned("acme")) == ["acme"]


def test_a_new_certificate_replaces_the_one_of_other_versions(monkeypatch):
    verified()
    monkeypatch.setattr("veomni_conformance.this_machine.installed_version", lambda name: "99")
    verified()
    packages = ("torch 99", "triton 99", "veomni-conformance 99", "veomni-ops 99")
    assert [each.checked.packages for each in read_ledger()[0]] == [packages]


def test_a_failure_takes_the_certificate_back():
    verified()
    verified(result=FAILED)
    assert not read_ledger()[0] and "failed veomni verify" in reasons(planned())[0]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"passed": [{"checked": 3}], "failed": []}',
        '{"passed": [{"checked": {}, "date": "", "cases": {}}], "failed": []}',
        "null",
    ],
)
def test_a_damaged_file_certifies_nothing_and_is_a_warning(text, caplog):
    verified()
    store().write_text(text)
    assert standing() == NEVER and "so nothing in it counts" in caplog.text


@pytest.mark.parametrize("cases", [{}, {"odd": (1.5, 0.0)}, {"odd": (0.5, float("nan"))}, {"odd": (-1, 0)}], ids=str)
def test_what_is_no_pass_can_not_be_certified(cases):
    (certificate,) = verified()
    with pytest.raises(ValueError, match="case"):
        Certificate(certificate.checked, "2026-11-23", cases)


@given(
    st.dictionaries(st.text(), st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1),
    st.lists(st.text(), min_size=6, max_size=6),
    st.lists(st.text()),
)
def test_a_certificate_is_the_same_after_writing_and_reading(cases, texts, packages):
    kernel_name, dtype, distribution, version, files, hardware = texts
    checked = CheckedKernel(kernel_name, dtype, distribution, version, files, hardware, tuple(packages), "driver 1")
    certificate = Certificate(checked, "2026-11-23", cases)
    assert Certificate.from_dict(json.loads(json.dumps(asdict(certificate)))) == certificate


def test_what_a_plugin_ships_was_seen_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("raise RuntimeError('a certificate is read without its plugin')")
    monkeypatch.syspath_prepend(tmp_path)
    (mine,) = verified()
    shipped = [replace(mine, checked=replace(mine.checked, hardware="cuda 9.0 (NVIDIA H200)"))]
    write_certificates(tmp_path / "p" / "veomni_certificates.json", [*shipped, mine])
    store().unlink()
    assert standing().startswith("verified elsewhere: cuda 9.0 (NVIDIA H200); cpu (CPU)")  # also if it is as here


def test_the_certificates_in_a_package_are_no_part_of_what_is_certified(install_healthy, tmp_path):
    from veomni_core import discover

    module = install_healthy("acme-shipped", "shipped")
    record = discover({"VEOMNI_PLUGINS": "acme-shipped"}).plugin("acme-shipped")
    (spec,) = record.kernels
    before = ThisMachine(CPU).checked(spec, record, "float32")
    assert len(before.files) == 64
    folder = tmp_path / "site-packages"
    (folder / f"{module}.py").write_text((folder / f"{module}.py").read_text() + "# patched")
    assert ThisMachine(CPU).checked(spec, record, "float32").files != before.files


def test_a_gpu_s_certificate_names_cuda_and_the_driver(tmp_path, monkeypatch):
    from veomni_conformance import this_machine

    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build")
    monkeypatch.setattr(this_machine, "_DRIVER", driver)
    monkeypatch.setattr(this_machine, "_cuda_of_torch", lambda: "CUDA 13.0")
    assert ThisMachine(H200).checked(ACME, PLUGIN, "bfloat16").driver == "CUDA 13.0, driver 570.124.06"
    assert ThisMachine(CPU).checked(ACME, PLUGIN, "bfloat16").driver == ""


def test_require_is_checked_as_other_settings():
    with pytest.raises(UnknownNameError, match="require: 'verifed' is unknown. Did you mean 'verified'"):
        OpsConfig.from_dict({"preset": "auto", "require": "verifed"}, REGISTRY, environ={})


@pytest.mark.thorough
def test_the_command_certifies_and_list_and_plan_show_it(veomni, install, tmp_path, monkeypatch):
    monkeypatch.setenv("VEOMNI_CACHE", str(tmp_path / "cache"))
    install(
        "acme-right",
        """
        from veomni_core import KernelSpec, hookimpl
        from veomni_ops.rms_norm import standard

        VEOMNI_PLUGIN_API_VERSION = 1

        @hookimpl
        def veomni_kernels():
            return [KernelSpec("right", "rms_norm", "standard", "{module}:standard", dtypes=("float32",))]
        """,
    )

    def standings():
        ops = json.loads(veomni("list", "--json"))["ops"]
        return {each["name"]: each["standing"] for op in ops for v in op["variants"].values() for each in v}

    assert standings()["right"] == NEVER
    job = tmp_path / "job.yaml"
    job.write_text(
        textwrap.dedent(
            """
            model:
              config: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
                       num_attention_heads: 4, vocab_size: 64}
              dtype: float32
              ops_implementation: {preset: eager, rms_norm_implementation: right, require: verified}
            """
        )
    )
    shipped = tmp_path / "certificates.json"
    veomni("plan", job, code=1)
    veomni("verify", "acme-right", "--device", "cpu", "--certify", shipped)
    assert f"{HERE}: rms_norm/standard:right" in veomni("plan", job)
    assert standings()["right"] == "certified on cpu (CPU)"
    (certificate,) = read_certificates(shipped)
    assert certificate.checked.kernel == "rms_norm/standard:right" and len(certificate.cases) > 5
    assert 0 < max(value for value, _ in certificate.cases.values()) <= 1
    assert certificate in read_ledger()[0]


@pytest.mark.thorough
def test_one_rank_without_the_certificate_ends_all_ranks(tmp_path):
    outputs = run_ranks(
        f"""
        from models import build
        from test_certificates import verified
        from planned_norms import kernel, registry
        from veomni_core import bind
        from veomni_core.errors import VeOmniError

        rank = torch.distributed.get_rank()
        os.environ["VEOMNI_CACHE"] = {str(tmp_path)!r} + f"/{{rank}}"
        if rank == 0:
            verified(dtype="float32")
        acme = registry(kernel("acme", preference=60), kernel("plain", preference=10))
        config = {{"preset": "eager", "rms_norm_implementation": "acme", "require": "verified"}}
        try:
            bind(build("llama"), config, registry=acme)
        except VeOmniError as error:
            print(type(error).__name__, error)
        """
    )
    assert outputs[0].startswith("PlanMismatchError 1 of 2 ranks can't plan:\nrank 1: rms_norm_implementation: ")
    assert outputs[1].startswith("KernelUnavailableError")
    assert all("has not passed veomni verify in float32 here" in output for output in outputs)


def test_a_kernel_s_own_library_is_part_of_what_is_certified(install_healthy, tmp_path):
    from veomni_core import discover

    install_healthy("acme-shipped", "shipped")
    library = tmp_path / "site-packages" / "acme_library.py"
    library.write_text("def kernel(x, weight, eps):\n    return x\n")
    record = discover({"VEOMNI_PLUGINS": "acme-shipped"}).plugin("acme-shipped")
    spec = replace(record.kernels[0], factory="acme_library:kernel")
    record = replace(record, kernels=(spec,))
    before = ThisMachine(CPU).checked(spec, record, "float32")
    library.write_text("def kernel(x, weight, eps):\n    return 1.5 * x\n")
    assert ThisMachine(CPU).checked(spec, record, "float32").files != before.files
