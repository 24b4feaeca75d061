"""What is said of a library that is missing, another version, half installed, or changed by the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from veomni_core import Hardware
from veomni_fla.loading import of_fla, of_library
from veomni_fla.plugin import veomni_kernels

HERE = Hardware("cuda", 90, name="NVIDIA H200", detected=True)
SPECS = {str(spec): spec for spec in veomni_kernels()}
COMPLETE = {
    "fla-core": "0.6.0",
    "triton": "3.8.0",
    "einops": "0.8.2",
    "tilelang": "0.1.12",
    "flash-qla": "0.1.3",
    "causal-conv1d": "1.6.1",
    "mamba-ssm": "2.3.2",
}
DELTA = "chunk_gated_delta_rule/standard:fla"


def distribution(folder, name, version, **files):
    """Something that looks like an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        file = folder / path.replace("__", "/", 1)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".py").write_text(text)
    return folder


def loading(*folders, **variables):
    """The error of loading fla's delta rule in a process that has ``folders`` first."""
    code = """
        from veomni_core.errors import KernelLoadError
        from veomni_fla.plugin import veomni_kernels

        try:
            veomni_kernels()[0].load()
        except KernelLoadError as error:
            print(error)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *sys.path]), **variables}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def installed(monkeypatch):
    """The versions that seem to be installed."""
    versions = dict(COMPLETE)
    monkeypatch.setattr("veomni_core.descriptions.hardware._installed_version", versions.get)
    return versions


def test_a_complete_installation_lacks_nothing(installed):
    assert {name: spec.hardware.unmet(HERE) for name, spec in SPECS.items()} == dict.fromkeys(SPECS, ())


@pytest.mark.parametrize(
    "package, version, reason",
    [
        ("fla-core", None, "needs fla-core>=0.6,<0.7, which is not installed"),
        ("fla-core", "0.5.2", "needs fla-core>=0.6,<0.7, 0.5.2 is installed"),
        ("fla-core", "0.7.0", "needs fla-core>=0.6,<0.7, 0.7.0 is installed"),
        ("einops", None, "needs einops, which is not installed"),
        ("triton", None, "needs triton>=3.3, which is not installed"),
        ("triton", "3.2.0", "needs triton>=3.3, 3.2.0 is installed"),
    ],
)
def test_what_is_missing_or_another_version_is_a_reason_before_anything_is_built(installed, package, version, reason):
    installed[package] = version
    fla = [spec for spec in SPECS.values() if spec.name.startswith("fla") and spec.name != "flash_qla"]
    reasons = {"kda": reason.replace("triton>=3.3", "triton>=3.4")}
    assert len(fla) == 5
    assert all(spec.hardware.unmet(HERE) == (reasons.get(spec.op_name, reason),) for spec in fla)


@pytest.mark.parametrize(
    "kernel, package",
    [
        ("chunk_gated_delta_rule/standard:fla_tilelang", "tilelang"),
        ("chunk_gated_delta_rule/standard:flash_qla", "flash-qla"),
        ("causal_conv1d/standard:causal_conv1d", "causal-conv1d"),
        ("mamba2_scan/standard:mamba_ssm", "mamba-ssm"),
    ],
)
def test_each_kernel_names_its_own_library(installed, kernel, package):
    installed[package] = None
    (reason,) = SPECS[kernel].hardware.unmet(HERE)
    assert reason.startswith(f"needs {package}") and reason.endswith("which is not installed")


def test_a_library_that_is_not_there_is_named_with_what_to_install():
    with pytest.raises(ImportError, match=r"fla-core is not installed \(.*\): pip install 'veomni-fla\[fla\]'"):
        of_fla("ops.gated_delta_rule.chunk", "chunk_gated_delta_rule")
    with pytest.raises(ImportError, match=r"causal-conv1d is not installed \(.*\): pip install 'causal-conv1d'"):
        of_library("causal-conv1d", "causal_conv1d.causal_conv1d_interface", "causal_conv1d_fn")


@pytest.mark.thorough
def test_a_missing_requirement_of_the_library_is_named(tmp_path):
    folder = distribution(tmp_path, "fla-core", "0.6.0", fla____init__="import einops_that_is_missing\n")
    assert "fla-core 0.6.0 needs einops_that_is_missing, which is not installed: pip install" in loading(folder)


@pytest.mark.thorough
def test_a_package_that_is_gone_is_to_be_installed_again(tmp_path):
    folder = distribution(tmp_path, "fla-core", "0.6.0", fla____init__='__version__ = "0.6.0"\n')
    said = loading(folder)
    assert "fla-core 0.6.0 is installed, but loading it failed (ModuleNotFoundError: No module named 'fla.ops'" in said
    assert "pip install --force-reinstall --no-deps 'fla-core==0.6.0'" in said


@pytest.mark.thorough
def test_an_old_distribution_that_hides_fla_core_is_named(tmp_path):
    old = distribution(tmp_path / "old", "flash-linear-attention", "0.2.2", fla____init__='__version__ = "0.2.2"\n')
    new = distribution(tmp_path / "new", "fla-core", "0.6.0", fla____init__='__version__ = "0.6.0"\n')
    said = loading(old, new)
    assert "the package fla that is imported is 0.2.2, and fla-core 0.6.0 is installed" in said
    assert "flash-linear-attention 0.2.2 brings it too: pip uninstall flash-linear-attention" in said


@pytest.mark.thorough
@pytest.mark.parametrize(
    "switch", ["FLA_USE_FAST_OPS=1", "FLA_USE_TMA=1", "FLA_TRIL_PRECISION=tf32", "FLA_CACHE_MODE=full"]
)
def test_a_switch_that_changes_the_kernels_is_refused(switch):
    name, _, value = switch.partition("=")
    assert f"{switch} makes fla run other kernels than those that are verified: unset it" in loading(**{name: value})


def test_describing_itself_imports_no_library():
    heavy = "{'torch', 'triton', 'fla', 'einops', 'flash_qla', 'causal_conv1d', 'mamba_ssm'}"
    code = f"""
import sys, veomni_fla.plugin, veomni_fla.limits
veomni_fla.plugin.veomni_kernels()
print(sorted({heavy} & sys.modules.keys()))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
