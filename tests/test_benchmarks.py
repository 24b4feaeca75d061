"""The benchmarks' folder: one place takes times, and scripts, pages and the list of both agree."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS, PAGES = ROOT / "benchmarks", ROOT / "docs" / "benchmarks"
FILES = sorted(BENCHMARKS.glob("*/*.py"))
SCRIPTS = [path for path in FILES if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
LIST = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
NEED_NO_GPU = (
    "core/core.py",
    "cross_entropy_loss/chunk_sizes.py",
    "plugins/cpu_kernels.py",
    "token_dispatch/traffic.py",
)


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


@pytest.fixture
def shared(monkeypatch):
    """Imports a module of benchmarks, as a script does."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_contenders_take_turns_and_warm_ups_do_not_count(shared):
    said = []
    calls = {"a": lambda: said.append("a"), "b": lambda: said.append("b")}
    times = shared("shared.measuring").seconds_in_turns(calls, 2, before=lambda: said.append("before"))
    assert said == ["before", "a", "before", "b"] * 3
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2}


def test_only_the_call_is_timed(shared):
    waits = []
    (taken,) = shared("shared.measuring").seconds(
        lambda: None, repeats=1, warm_ups=0, before=lambda: time.sleep(0.2), wait=lambda: waits.append(1)
    )
    assert taken < 0.1
    assert len(waits) == 2


def test_a_step_starts_without_gradients_and_leaves_its_own(shared):
    x = torch.ones(3, requires_grad=True)
    step = shared("shared.measuring").training_step(lambda: 2 * x.sum(), lambda loss: loss.backward(), [x])
    step(), step()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "page", [path.stem for path in sorted(PAGES.glob("*.json")) if path.name.startswith(("moe", "quack", "triton"))]
)
def test_a_page_begins_with_what_its_figures_give(page, shared, tmp_path, monkeypatch):
    wanted = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    data = json.loads((PAGES / f"{page}.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(shared("shared.results"), "FOLDER", tmp_path)
    (script,) = re.findall(r"Script: `(.*?)`", wanted)
    if "moe" in page:
        shared("moe_experts.moe").write(page, data)
    elif "delta_rule" in page:
        shared("chunk_gated_delta_rule.triton_chunk_gated_delta_rule").write(page, data)
    else:
        title = wanted.splitlines()[0].removeprefix("# ")
        shared("shared.memory_bound").write_page(page, title, data, str(ROOT / script))
    # What a person adds about a run stands below.
    assert wanted.startswith((tmp_path / f"{page}.md").read_text(encoding="utf-8"))
