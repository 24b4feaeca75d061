"""What the tests of Hub kernels share: a cache of their own, a right package, and the registry of a kernel file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_folders import write_file, write_package

import veomni_hub.plugin
from veomni_conformance.given_kernels import definitions
from veomni_core.discovery.conflicts import settle
from veomni_core.discovery.hooks import described_by
from veomni_core.discovery.registry import PluginRecord, Registry, build_registry
from veomni_hub import imported
from veomni_hub.kernel_file import VARIABLE

Listed = Callable[..., Registry]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with nothing verified, and with no kernel file."""
    monkeypatch.setenv("VEOMNI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def _nothing_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages of other tests, whose ids are the same, are forgotten."""
    monkeypatch.setattr(imported, "_imported", {})
    yield
    for name in [name for name in sys.modules if name.startswith("_acme")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _no_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' simulated NPU has no CANN, whose version ``kernels`` asks for where it sees an NPU."""
    monkeypatch.setattr("kernels.backends._get_torch_privateuse_backend_name", lambda: None)


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """The folder of a package whose norm is right."""
    write_package(tmp_path / "acme-norm")
    return tmp_path / "acme-norm"


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Listed:
    """Writes a kernel file for a folder, and gives the registry that discovery makes of it."""

    def listed(folder: Path, /, *kernels: dict[str, Any], **entry: Any) -> Registry:
        monkeypatch.setenv(VARIABLE, str(write_file(tmp_path / "hub.yaml", folder, *kernels, **entry)))
        record = PluginRecord("veomni-hub", "veomni-hub", "0.1.0", "m", **described_by(veomni_hub.plugin))
        return build_registry(settle([*definitions(), record]), {})

    return listed
