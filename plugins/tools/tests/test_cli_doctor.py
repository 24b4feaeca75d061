"""``veomni doctor``: each plugin in a process of its own; and what ``veomni list`` shows of those that are left out."""

from __future__ import annotations

import importlib.metadata
import json
import platform

import pytest

from veomni_tools.cli.doctor import describe_versions

SLOW = "import time\ntime.sleep(60)\n"
KERNEL_PLUGIN = """
    from veomni_core import KernelSpec, OpSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def kernel(x):
        return x

    @hookimpl
    def veomni_kernels():
        return [KernelSpec("mine", "{op}", "standard", "{module}:kernel")]
"""
OPS = """
    @hookimpl
    def veomni_ops():
        return [OpSpec(name="far_op", variants=("standard",), config_field="far_op_implementation", contract="m:c")]
"""


def report_of(text: str, name: str) -> dict:
    data, _ = json.JSONDecoder().raw_decode(text)  # what was logged follows
    (report,) = [plugin for plugin in data["plugins"] if plugin["name"] == name]
    return report


@pytest.mark.thorough
def test_doctor_reports_a_kernel_that_two_plugins_claim(veomni, install):
    install("plugin-a", KERNEL_PLUGIN.replace("{op}", "rms_norm"))
    install("plugin-b", KERNEL_PLUGIN.replace("{op}", "rms_norm"))
    conflict = "kernel rms_norm/standard:mine is claimed by plugin-a 1.0 and plugin-b 1.0, so neither is used"
    (found,) = json.loads(veomni("doctor", "--json", code=1))["conflicts"]
    assert found.startswith(conflict)
    assert f"conflict: {conflict}" in veomni("doctor", code=1)
    assert f"conflict: {conflict}" in veomni("list")


def test_doctor_reports_an_op_that_two_plugins_define(veomni, install):
    install("plugin-a", KERNEL_PLUGIN.replace("{op}", "far_op") + OPS)
    install("plugin-b", KERNEL_PLUGIN.replace("{op}", "far_op") + OPS)
    text = veomni("doctor", "--json", code=1)
    for name in ("plugin-a", "plugin-b"):
        assert report_of(text, name)["status"] == "failed"
        assert report_of(text, name)["problem"].endswith("is defined by plugin-a 1.0 and plugin-b 1.0")


def test_doctor_examines_a_plugin_together_with_the_one_whose_op_it_serves(veomni, install):
    install("op-plugin", "    from veomni_core import OpSpec, hookimpl\n    VEOMNI_PLUGIN_API_VERSION = 1\n" + OPS)
    install("kernel-plugin", KERNEL_PLUGIN.replace("{op}", "far_op"))
    report = report_of(veomni("doctor", "--json"), "kernel-plugin")
    assert (report["status"], report["problem"], report["left_out"]) == ("loaded", "", [])
    assert (report["usable"], report["kernels"]) == (1, 1)


@pytest.mark.thorough
def test_list_and_doctor_show_a_kernel_that_was_left_out(veomni, install):
    install("newer-plugin", KERNEL_PLUGIN.replace("{op}", "rms_nrm"))
    reason = "op 'rms_nrm' is unknown. Did you mean 'rms_norm'?"
    assert report_of(veomni("doctor", "--json"), "newer-plugin")["left_out"] == [
        f"kernel rms_nrm/standard:mine: {reason}"
    ]
    listed = report_of(veomni("list", "--json"), "newer-plugin")
    assert listed["left_out"] == [{"kernel": "rms_nrm/standard:mine", "reason": reason}]
    for verb in ("list", "doctor"):
        assert "left out: kernel" in veomni(verb)


def test_doctor_reports_a_detection_that_answers_with_something_else(veomni, install):
    install(
        "device-plugin",
        """
        from veomni_core import DeviceSpec, hookimpl
        VEOMNI_PLUGIN_API_VERSION = 1
        def detect():
            return "acme"
        @hookimpl
        def veomni_devices():
            return [DeviceSpec("acme", "{module}:detect")]
        """,
    )
    (problem,) = report_of(veomni("doctor", "--json", code=1), "device-plugin")["devices"]
    assert "must return a Hardware or None, not 'acme' (str)" in problem


def test_doctor_is_content_with_healthy_plugins(veomni, install_healthy):
    install_healthy("good-plugin", "good")
    assert "good-plugin" in veomni("doctor")


@pytest.mark.thorough
def test_doctor_prints_the_versions_that_a_bug_report_needs(veomni):
    found = json.loads(veomni("doctor", "--json", fresh=True))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    assert found["versions"] | versions == found["versions"]
    assert found["versions"]["python"] == platform.python_version()
    assert {"cuda", "rocm", "driver"} < {*found["versions"]} and found["torch_problem"] == ""


def test_doctor_describes_versions():
    cpu = {
        "python": "3.12.1",
        "torch": "2.9.0+cpu",
        "transformers": "5.2.0",
        "cuda": None,
        "rocm": None,
        "driver": None,
    }
    built = "Python 3.12.1, torch 2.9.0+cpu (built without CUDA or ROCm), transformers 5.2.0, no GPU driver found"
    assert describe_versions(cpu) == built
    gpu = {**cpu, "torch": "2.9.0", "cuda": "12.8", "driver": "570.86.10"}
    assert "torch 2.9.0 (CUDA 12.8), transformers 5.2.0, GPU driver 570.86.10" in describe_versions(gpu)


@pytest.mark.thorough
def test_doctor_goes_on_without_torch_and_says_what_is_wrong_with_it(veomni, tmp_path):
    broken = tmp_path / "site-packages" / "torch"  # where the command looks first
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.99 is not here')")
    text = " ".join(veomni("doctor", code=1, fresh=True).split())
    assert "torch can't be imported: its process ended with code 1: ImportError: libcudart.so.99 is not here" in text
    assert "hardware: cpu" in text and "veomni-liger" in text


@pytest.mark.thorough
def test_doctor_isolates_each_plugin(veomni, install, install_healthy, install_absent):
    install_healthy("good-plugin", "good")
    install("slow-plugin", SLOW)
    install("crashing-plugin", "import os\nos._exit(7)")
    install_absent("far-plugin")
    text = veomni("doctor", "--timeout", "15", "--json", code=1, fresh=True)
    data = json.loads(text)
    plugins = {plugin["name"]: plugin for plugin in data["plugins"]}
    assert plugins["good-plugin"]["status"] == "loaded" and plugins["good-plugin"]["usable"] == 1
    assert plugins["slow-plugin"]["problem"] == "did not load within 15 s"
    assert plugins["crashing-plugin"]["problem"].startswith("its process ended with code 7")
    assert not plugins["good-plugin"]["initialises_cuda"] and plugins["good-plugin"]["imports"] == []
    assert any(gain["distribution"] == "veomni-far" for gain in data["gains"])
