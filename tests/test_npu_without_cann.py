"""The real torch_npu where CANN is not installed: importing it fails, and torch with it; what is said about that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import torch_npu_wheel

pytestmark = pytest.mark.npu_schema

# Its wheel is for Linux and for Python 3.11; elsewhere its import fails for another reason.
if sys.platform != "linux" or sys.version_info[:2] != (3, 11):
    pytest.skip("torch-npu's wheel is unpacked for Linux and Python 3.11", allow_module_level=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the real torch_npu installed."""
    path = os.pathsep.join([str(torch_npu_wheel.unpacked()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.thorough
def test_its_own_message_names_neither_cann_nor_what_to_do():
    done = run("-c", "import torch")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: Failed to load the backend extension: torch_npu.")


def test_detection_says_that_cann_is_missing_and_goes_on():
    done = run("-c", "from veomni_core import discover; print(discover().detect_hardware().device_type)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("cpu", "cuda")
    for part in ("device type npu counts as absent", "a library of CANN is not found", "libhccl.so", "set_env.sh"):
        assert part in done.stderr


@pytest.mark.thorough
def test_the_doctor_says_so_too_and_blames_no_other_plugin():
    done = run("-m", "veomni_core.cli", "doctor")
    assert done.returncode == 1, done.stdout
    assert "a library of CANN is not found" in done.stderr
    state = {
        row[1].strip(): row[2].strip() for row in (line.split("│") for line in done.stdout.splitlines()) if row[4:]
    }
    assert "veomni_npu.device:detect failed" in state.pop("veomni-npu")
    assert {found for plugin, found in state.items() if plugin.startswith("veomni-")} == {"loaded"}
