"""The benchmarks' folder: one place takes times, and scripts, pages and the list of both agree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS, PAGES = ROOT / "benchmarks", ROOT / "docs" / "benchmarks"
FILES = sorted(BENCHMARKS.glob("*/*.py"))
SCRIPTS = [path for path in FILES if "def main()" in path.read_text(encoding="utf-8")]
LIST = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
NEED_NO_GPU = ("core/core.py", "cross_entropy_loss/chunk_sizes.py", "plugins/cpu_kernels.py")


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_one_module_takes_times():
    def reads_a_clock(path: Path) -> bool:
        return bool(imported(path) & {"time", "timeit", "triton.testing"}) or "cuda.Event(" in path.read_text()

    assert [path.relative_to(BENCHMARKS).as_posix() for path in FILES if reads_a_clock(path)] == ["shared/measuring.py"]


def test_every_script_is_in_the_list():
    listed = {}
    for folder, scripts in re.findall(r"^\| (?:`(\w+)`)? ?\| (`.*?\.py`) \|", LIST, re.MULTILINE):
        listed.setdefault(folder or list(listed)[-1], []).extend(re.findall(r"`(\w+\.py)`", scripts))
    found = {}
    for path in SCRIPTS:
        found.setdefault(path.parent.name, []).append(path.name)
    assert {folder: sorted(scripts) for folder, scripts in listed.items()} == found


def test_every_page_names_a_script_and_is_in_the_list():
    for figures in PAGES.glob("*.json"):
        page = figures.with_suffix(".md").read_text(encoding="utf-8")
        (script,) = re.findall(r"Script: `(.*?)`", page)
        assert ROOT / script in SCRIPTS, figures.stem
        assert f"(../docs/benchmarks/{figures.stem}.md)" in LIST


@pytest.mark.slow
@pytest.mark.parametrize("script", NEED_NO_GPU)
def test_a_script_that_needs_no_gpu_starts_from_the_repository_s_root(script):
    result = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--help"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "usage:" in result.stdout
