"""Fixtures that several of these files share: folders of whole jobs, and repositories whose revisions are measured."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bench_repositories import ROOT, Repository


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the jobs name: beside them, text and models; in the working directory, a config."""
    from whole_jobs import write_what_jobs_name

    root = tmp_path_factory.mktemp("jobs")
    write_what_jobs_name(root)
    return root


@pytest.fixture
def revisions(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/revisions, as its script does."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.revisions.{name}")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)
