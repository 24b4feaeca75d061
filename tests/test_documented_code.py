"""Every code block of the documentation is run, by this test or by the one that its mark names, or says why not."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from documented_code import ROOT, blocks, pages, plugins
from page_run import PageRun

WITH_CODE = [page for page in pages() if any(True for _ in blocks(page))]
RUN_HERE = [page for page in WITH_CODE if any(block.is_run for block in blocks(page))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Runs a page as in a fresh process: what it imports, sets and installs is gone afterwards."""
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path.endswith("/src")))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(page: Path) -> None:
        if named := plugins(page):
            monkeypatch.setenv("VEOMNI_PLUGINS", named)
        before = {*sys.modules}
        try:
            with torch.random.fork_rng(devices=[]):
                PageRun(folder).run(page)
        finally:
            for module in {*sys.modules} - before:
                if str(folder) in str(getattr(sys.modules[module], "__file__", "")):
                    del sys.modules[module]
            importlib.invalidate_caches()

    return run


@pytest.mark.parametrize("page", RUN_HERE, ids=_name)
def test_the_code_of_a_page_runs(page: Path, read: Callable[[Path], None]) -> None:
    read(page)


@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_a_test_that_a_page_names_runs_that_page(page: Path) -> None:
    for block in blocks(page):
        if named := block.value("run by "):
            test = ROOT / named
            assert test.is_file(), f"{block}: there is no {named}"
            what = page.parent.name if page.name == "README.md" and page.parent != ROOT else page.name
            assert what in test.read_text(encoding="utf-8"), f"{block}: {named} doesn't name {what}"
        assert block.mark != "not run:", f"{block}: say why it is not run"
