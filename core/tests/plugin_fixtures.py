"""Fixtures for tests of the core and what is beside it: plugins as installed distributions, without pip."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from counting_kernels import calls
from forked_processes import Forked, finish
from forked_workers import run_veomni_in_forks
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry

Installer = Callable[..., str]

HEALTHY = """
    from veomni_core import HardwareRequirement, KernelSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def kernel(x, weight, eps):
        return x * weight

    @hookimpl
    def veomni_kernels():
        return [KernelSpec(name="{kernel}", op_name="rms_norm", variant="standard", factory="{module}:kernel")]
"""


WITH_AN_ABSENT_KERNEL = """
from veomni_core import OpSpec, hookimpl
VEOMNI_PLUGIN_API_VERSION = 1
@hookimpl
def veomni_ops():
    published = {"far": "veomni-far"}
    return [
        OpSpec(
            name="far_op",
            variants=("standard",),
            config_field="far_op_implementation",
            contract="m:c",
            published=published,
        )
    ]
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine decides what a test sees."""
    for name in list(os.environ):
        if (name.startswith("VEOMNI_") and name != "VEOMNI_CACHE") or name in ("MODELING_BACKEND", "USE_GROUP_GEMM"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    calls.clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """Puts a distribution with one plugin on ``sys.path``, as pip would lay it out; gives its module's name."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    installed: list[str] = []

    def install(
        distribution: str,
        source: str,
        *,
        plugin: str | None = None,
        version: str = "1.0",
        group: str = "veomni.plugins",
    ) -> str:
        module = f"{distribution.replace('-', '_')}_{tmp_path.name.replace('-', '_')}"
        (folder / f"{module}.py").write_text(textwrap.dedent(source).replace("{module}", module))
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{plugin or distribution} = {module}\n")
        installed.append(module)
        importlib.invalidate_caches()
        return module

    yield install
    for module in installed:
        sys.modules.pop(module, None)
    importlib.invalidate_caches()


@pytest.fixture
def install_healthy(install: Installer) -> Callable[[str, str], str]:
    """Installs a plugin with one good kernel for rms_norm."""
    return lambda distribution, kernel: install(distribution, HEALTHY.replace("{kernel}", kernel))


@pytest.fixture
def install_absent(install: Installer) -> Callable[[str], str]:
    """Installs a plugin with the op ``far_op``, whose one kernel ``far`` is in a distribution that is not installed."""
    return lambda distribution: install(distribution, WITH_AN_ABSENT_KERNEL)


@pytest.fixture(scope="session")
def registry() -> Registry:
    """What the plugins installed beside the tests describe."""
    return discover({})


@pytest.fixture
def bf16_accelerator() -> Iterator[Any]:
    """Accelerate under autocast to bfloat16. A process has one state of it, which another test may have set."""
    accelerate = pytest.importorskip("accelerate")
    reset = accelerate.state.AcceleratorState._reset_state
    reset(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    reset(reset_partial_state=True)


@pytest.fixture
def veomni(tmp_path: Path) -> Callable[..., str]:
    """Runs ``veomni`` in a process; plugins that the test installs are seen beside the real ones.

    Verbs that import torch run in a fork of a process that has done so, unless they are asked to start ``fresh``.
    """
    site_packages = str(tmp_path / "site-packages")
    path = os.pathsep.join(filter(None, [site_packages, os.environ.get("PYTHONPATH", "")]))

    def run(*arguments: object, code: int = 0, fresh: bool = False, **environment: str) -> str:
        words, variables = [*map(str, arguments)], {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **environment}
        if words[0] in ("plan", "verify", "tune", "doctor") and not fresh:
            fork = Forked(run_veomni_in_forks, *words, environment=variables, folder=tmp_path, path=[site_packages])
            (done,) = finish([fork], timeout=300)
        else:
            command = [sys.executable, "-m", "veomni_core.cli", *words]
            done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stdout + done.stderr

    return run
