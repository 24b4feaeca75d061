"""Detection of the NPU, and what is said of a torch_npu that is absent, unusable, or made for another torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from veomni_core import Hardware
from veomni_npu.device import detect
from veomni_npu.plugin import veomni_devices, veomni_kernels
from veomni_npu.torch_npu_loading import TorchNpuError

JOB = """
model:
  config: {model_type: llama, num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, vocab_size: 32}
  ops_implementation: {preset: eager}
"""
MISSING_LIBRARY = "libhccl.so: cannot open shared object file: No such file or directory"


@pytest.fixture
def install_torch_npu(tmp_path, monkeypatch):
    """Put a torch_npu of the given version and source first on the path."""

    def install(source: str, version: str = torch.__version__.partition("+")[0]) -> None:
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "__init__.py").write_text(source)
        metadata = tmp_path / f"torch_npu-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)

    yield install
    sys.modules.pop("torch_npu", None)


def test_an_npu_is_described(npu):
    found = detect()
    assert (found.device_type, found.count, found.detected) == (npu, torch.npu.device_count(), True)
    assert found.name == torch.npu.get_device_name(0)


def test_without_torch_npu_there_is_none_and_the_kernels_say_what_is_missing():
    assert detect() is None
    (reason,) = veomni_kernels()[0].hardware.unmet(Hardware("npu", name="Ascend910B3", detected=True))
    assert reason == "needs torch-npu>=2.9, which is not installed"


def test_torch_npu_without_a_device_is_no_npu(install_torch_npu):
    install_torch_npu("class npu:\n    device_count = staticmethod(lambda: 0)\n")
    assert detect() is None


def test_without_cann_the_message_says_what_to_install(install_torch_npu):
    install_torch_npu(f"raise ImportError({MISSING_LIBRARY!r})")
    with pytest.raises(TorchNpuError, match=r"a library of CANN is not found \(libhccl.so.*install the CANN toolkit"):
        detect()


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("command", [("verify", "veomni-npu"), ("plan", "job.yaml")])
def test_without_cann_commands_say_so_before_they_import_torch(install_torch_npu, tmp_path, command):
    install_torch_npu(f"raise ImportError({MISSING_LIBRARY!r})")
    (metadata,) = tmp_path.glob("*.dist-info")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "veomni_core.cli", *command]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "a library of CANN is not found" in done.stderr
    assert "Failed to load the backend extension" not in done.stderr


def test_another_failure_is_told_as_it_is(install_torch_npu):
    install_torch_npu("raise RuntimeError('driver too old')")
    with pytest.raises(TorchNpuError, match="importing it failed: RuntimeError: driver too old"):
        detect()


def test_versions_that_do_not_match_are_told_before_the_import(install_torch_npu):
    install_torch_npu("raise AssertionError('imported')", version="1.11.0.post2")
    with pytest.raises(TorchNpuError, match=r"torch_npu 1\.11\.0\.post2 is built for torch 1\.11\.0, but torch 2\."):
        detect()


def test_the_switch_of_torchs_autoload_stays_as_it_was(install_torch_npu, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    install_torch_npu("import os\nclass npu:\n    device_count = staticmethod(lambda: 0)\n")
    detect()
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    detect()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ


def test_products_can_be_named():
    (device,) = veomni_devices()
    assert {name: hardware.describe() for name, hardware in device.named.items()} == {
        "ascend-910b": "npu (Ascend 910B)",
        "ascend-910_93": "npu (Ascend 910_93)",
    }
