"""A distribution that brings a new op: installed by pip where nothing but wheels is, and used from YAML alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fresh_environment import FAMILY, FreshEnvironment, build_wheel

ROOT = Path(__file__).resolve().parent.parent
JOB = """
model:
  config:
    model_type: gpt2
    n_embd: 32
    n_layer: 3
    n_head: 2
    n_positions: 64
    activation_function: gelu_new
    resid_pdrop: 0.0
    embd_pdrop: 0.0
    attn_pdrop: 0.0
  ops_implementation:
    preset: eager
    {field}: {value}
data:
  files: text
  sequence_length: 32
train:
  output_dir: {run}
  steps: 3
  batch_size: 2
  device: cpu
"""
VEOMNI = ("-m", "veomni_core.cli")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> FreshEnvironment:
    """Core, trainer and the third party's plugin, each from its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [*FAMILY, "plugins/trainer", "examples/plugin_gelu"]
    wheels = [build_wheel(ROOT / source, folder) for source in sources]
    environment = FreshEnvironment(folder / "environment")
    environment.link_requirements(wheels)
    environment.install(*wheels)
    return environment


@pytest.fixture(scope="module")
def veomni(environment):
    """Runs the command in forks of a process that has imported transformers and what trains."""
    with environment.forks("veomni_transformers.build", "veomni_trainer.run.run_job") as run:
        yield lambda *arguments, **options: run(*VEOMNI, *arguments, **options)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)

    def write(field: str, value: str, run: str = "run") -> Path:
        path = tmp_path / f"{run}.yaml"
        path.write_text(JOB.format(field=field, value=value, run=tmp_path / run))
        return path

    return write


def test_it_is_found(environment):
    listed = json.loads(environment.run(*VEOMNI, "list", "--json"))
    (plugin,) = [plugin for plugin in listed["plugins"] if plugin["name"] == "acme-gelu"]
    assert (plugin["distribution"], plugin["version"], plugin["status"]) == ("acme-veomni-gelu", "1.2.0", "loaded")
    (op,) = [op for op in listed["ops"] if op["op"] == "gelu"]
    assert [kernel["name"] for kernel in op["variants"]["tanh"]] == ["fused"]


@pytest.mark.thorough
def test_it_is_checked_like_the_core_s_own(environment):
    results = json.loads(environment.run(*VEOMNI, "verify", "acme-gelu", "--json"))["results"]
    assert [(r["dtype"], r["result"]) for r in results] == [(d, "ok") for d in ("float32", "bfloat16", "float16")]


@pytest.mark.thorough
def test_it_is_planned_bound_and_trained(veomni, job, tmp_path):
    plan = json.loads(veomni("plan", str(job("gelu_implementation", "fused")), "--json"))
    (op,) = [op for op in plan["ops"] if op["op_name"] == "gelu"]
    assert [site["kernel"] for site in op["sites"]] == ["fused"] * 3

    veomni("train", str(job("gelu_implementation", "fused")))
    veomni("train", str(job("gelu_implementation", "eager", "eager")))
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    (op,) = [op for op in receipt["ops"] if op["op"] == "gelu"]
    assert (op["chosen"], op["bound"], op["found"]) == (["fused"], 3, 3)
    (kernel,) = receipt["kernels"]
    assert (kernel["distribution"], kernel["version"]) == ("acme-veomni-gelu", "1.2.0")
    mine, eager = (_losses(tmp_path / name) for name in ("run", "eager"))
    assert len(mine) == 3
    assert mine == pytest.approx(eager, rel=1e-5)


def test_its_field_is_checked_like_the_core_s_own(veomni, job):
    said = veomni("plan", str(job("gelu_implementation", "fussed")), check=False)
    assert re.search(r"fussed.*Did you mean '?fused'?", " ".join(said.split())), said
    said = veomni("plan", str(job("gelu_implementations", "fused")), check=False)
    assert re.search(r"no such field\. Did you mean '?gelu_implementation'?", " ".join(said.split())), said


def _losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]
