"""The benchmarks' folder: one place takes times, and scripts, result files and the list agree."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forked_processes import Forked, finish
from reference_pages import benchmarks
from veomni_conformance.triton_interpreter import mend_interpreter

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"
FILES = sorted(BENCHMARKS.glob("*/*.py"))
SCRIPTS = [path for path in FILES if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
LIST = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
NEED_NO_GPU = (
    "causal_conv1d/causal_conv1d.py",
    "core/core.py",
    "core/host_cost.py",
    "cross_entropy_loss/chunk_sizes.py",
    "plugins/cpu_kernels.py",
    "revisions/compare_revisions.py",
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


def test_every_result_names_its_script_and_the_script_its_page():
    for file in RESULTS.glob("*.json"):
        script = json.loads(file.read_text(encoding="utf-8"))["script"]
        assert ROOT / script in SCRIPTS, file.stem
        page = f"(../docs/benchmarks/{benchmarks.page_of(file.stem)}.md)"
        assert any(f"`{Path(script).name}`" in line and page in line for line in LIST.splitlines()), file.stem


@pytest.mark.thorough
@pytest.mark.parametrize("script", NEED_NO_GPU)
def test_a_script_that_needs_no_gpu_starts_from_the_repository_s_root(script):
    words = [f"benchmarks/{script}", "--help"]
    if script == NEED_NO_GPU[0]:
        result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    else:  # importing torch takes longer than the rest
        (result,) = finish([Forked(_start, *words, environment={**os.environ}, folder=ROOT)], timeout=120)
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


def _start(*words: str) -> None:
    """Run a script as ``python SCRIPT`` does, with what is installed and the script's own folder on the path."""
    installed = [
        path
        for path in sys.path
        if path.endswith("/src") or ROOT not in (Path(path), *Path(path).parents) or "site-packages" in path
    ]
    sys.argv, sys.path[:] = [*words], [str(ROOT / Path(words[0]).parent), *installed]
    runpy.run_path(words[0], run_name="__main__")


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


def test_what_is_compared_at_two_revisions_is_what_has_a_benchmark(shared):
    guarded = {each.script for each in shared("revisions.selection").GUARDED}
    having = {path for path in SCRIPTS if re.search("^BENCHMARK = ", path.read_text(encoding="utf-8"), re.MULTILINE)}
    assert {path.relative_to(BENCHMARKS).as_posix() for path in having} == guarded


GUARDED_OURS = {  # the contenders of a script, where listing them needs no GPU
    "load_balancing_loss.triton_load_balancing_loss": lambda script: script.FUNCTIONS,
    "moe_experts.moe": lambda script: {name for name, _ in script.contenders()} | {"veomni fused_quack"},
    "rms_norm.triton_rms_norm": lambda script: script.contenders(),
    "rms_norm_gated.triton_rms_norm_gated": lambda script: script.contenders(script.CASES[0]),
    "rotary_pos_emb.triton_rotary_pos_emb": lambda script: script.functions(script.CASES[0]),
    "rotary_pos_emb_vision.triton_rotary_pos_emb_vision": lambda script: script.functions(script.CASES[0]),
    "swiglu_mlp.triton_swiglu_mlp": lambda script: script.functions("standard"),
    "causal_conv1d.triton_causal_conv1d": lambda script: script.contenders(script.CASES[0], None),
    "chunk_gated_delta_rule.triton_chunk_gated_delta_rule": lambda script: script.contenders(),
    "mamba2_scan.triton_mamba2_scan": lambda script: script.contenders(),
    "mamba2_scan.triton_selective_scan": lambda script: script.contenders(),
    "attention.triton_attention": lambda script: script.calls(script.SHAPES[0]),
    "linear.triton_linear": lambda script: script.KERNELS,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", GUARDED_OURS)
def test_the_benchmark_of_a_gpu_script_names_contenders_that_are_there(shared, name):
    script = shared(name)
    assert script.BENCHMARK.shapes["cuda"]
    assert set(script.BENCHMARK.ours) <= set(GUARDED_OURS[name](script))


@pytest.mark.thorough
def test_every_guarded_script_has_shapes_for_its_device(shared):
    for each in shared("revisions.selection").GUARDED:
        benchmark = shared(each.script.removesuffix(".py").replace("/", ".")).BENCHMARK
        assert benchmark.shapes[each.device] and benchmark.ours, each


@pytest.mark.parametrize("captured", [True, False])
def test_a_gpu_script_gives_the_times_and_the_memory_of_ours(shared, monkeypatch, captured):
    """Its kernels run here, in Triton's interpreter; a GPU's clock and allocator are stood in for."""
    if not torch.cuda.is_available():
        mend_interpreter()
    script, memory_bound = shared("rms_norm.triton_rms_norm"), shared("shared.memory_bound")
    ran = []

    def timing(call):
        ran.append(call())
        return shared("shared.measuring").Timing(median=2.0, low=1.0, high=3.0)

    monkeypatch.setattr(memory_bound, "timing", timing)
    monkeypatch.setattr(memory_bound, "peak_mib_of_step", lambda step, inputs: 1.5)
    monkeypatch.setattr(memory_bound, "captured", lambda step: captured and step)
    x, weight, dy = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((4, 64), (64,), (4, 64)))
    monkeypatch.setattr(script, "drawn", lambda *_: (x.requires_grad_(), weight.requires_grad_(), dy))
    found = script.BENCHMARK.measure((4, 64), "cuda", 1, script.BENCHMARK.ours)
    assert found.pop("seconds as a graph") == ({"ours": 0.002} if captured else {})
    assert found == {"seconds": {"ours": 0.002}, "peak bytes": {"ours": {"both": 3 << 19}}}
    assert ran[0].shape == (4, 64) and x.grad is not None


def test_a_cpu_script_s_calls_are_timed_by_the_one_clock(shared, monkeypatch):
    """With a clock that the calls themselves move: both passes count, and the first turn does not."""
    now = [0.0]
    monkeypatch.setattr(shared("shared.measuring").time, "perf_counter", lambda: now[0])
    x = torch.ones(1024, requires_grad=True)

    def call(takes):
        now[0] += takes
        result = 2 * x
        result.register_hook(lambda gradient: now.__setitem__(0, now[0] + takes))
        return result

    calls = {"slow": lambda: call(2.0), "fast": lambda: call(1.0)}
    found = shared("shared.in_processes").figures(calls, [x], 3, only=["slow"])
    assert found["seconds"] == {"slow": 4.0}
    assert found["peak bytes"]["slow"]["both"] >= x.nbytes


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(RESULTS.glob("*.json")) if path.name.startswith(("moe", "quack", "triton"))]
)
def test_a_result_file_s_table_is_what_its_figures_give(name, shared, tmp_path, monkeypatch):
    wanted = benchmarks.result(name)
    monkeypatch.setattr(shared("shared.results"), "FOLDER", tmp_path)
    if "moe" in name:
        shared("moe_experts.moe").write(name, wanted)
    elif "delta_rule" in name:
        shared("chunk_gated_delta_rule.triton_chunk_gated_delta_rule").write(name, wanted)
    elif "attention" in name:
        shared("attention.triton_attention").write(name, wanted)
    elif "selective" in name:
        shared("mamba2_scan.triton_selective_scan").write(name, wanted)
    elif "mamba2" in name:
        shared("mamba2_scan.triton_mamba2_scan").write(name, wanted)
    else:
        shared("shared.memory_bound").write_file(name, wanted["title"], wanted, str(ROOT / wanted["script"]))
    assert json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) == wanted
