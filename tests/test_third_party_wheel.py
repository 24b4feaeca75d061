"""Distributions that bring an op and a model: installed by pip where nothing but wheels is, and used from YAML."""

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
    """Core, trainer, plain kernels and the third parties' plugins, each from its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [*FAMILY, "plugins/trainer", "plugins/torch_native", "examples/plugin_gelu", "examples/plugin_model"]
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


MODEL_JOB = """
model:
  config:
    model_type: acme_parallel
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
  ops_implementation: {preset: eager, rms_norm_implementation: torch, attn_implementation: sdpa}
data: {files: text, sequence_length: 32}
train: {output_dir: RUN, steps: 3, batch_size: 2, device: cpu, export: true}
"""
RELOAD = """
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from veomni_core import binding_of, build_foundation_model
from veomni_transformers.build import load_as_trained

exported = Path(sys.argv[1])


def built():
    options = {"torch_dtype": "float32", "init_device": "cpu", "device": "cpu"}
    return build_foundation_model(exported, exported, ops_implementation={"preset": "auto"}, **options)


ids = torch.arange(20).view(2, 10)
before = built()
own = load_as_trained(exported)(input_ids=ids).logits
assert torch.allclose(before(input_ids=ids).logits, own, atol=1e-5)
print(sorted({op.op_name for op in binding_of(before).plan.ops for site in op.sites if site.bound}))

# Its published layout: queries, keys and values in one tensor, gate and up in two.
tensors = {}
for file in exported.glob("*.safetensors"):
    tensors |= load_file(file)
    file.unlink()
for index in exported.glob("*.index.json"):
    index.unlink()
for layer in range(2):
    q, k, v = (tensors.pop(f"model.layers.{layer}.self_attn.{each}_proj.weight") for each in "qkv")
    groups = [q.view(2, 2, 8, 32), k.view(2, 1, 8, 32), v.view(2, 1, 8, 32)]
    tensors[f"blocks.{layer}.wqkv"] = torch.cat(groups, dim=1).reshape(-1, 32)
    halves = tensors.pop(f"model.layers.{layer}.mlp.gate_up.weight").chunk(2)
    tensors |= {f"blocks.{layer}.{name}": half.clone() for name, half in zip(("w1", "w3"), halves)}
save_file(tensors, exported / "model.safetensors", metadata={"format": "pt"})
again = built()
assert all(torch.equal(p, again.get_parameter(name)) for name, p in before.named_parameters())
"""


@pytest.mark.thorough
def test_a_model_that_transformers_does_not_have_is_planned_trained_saved_and_reloaded(
    environment, veomni, job, tmp_path
):
    job("gelu_implementation", "eager")  # for its text
    path = tmp_path / "model.yaml"
    path.write_text(MODEL_JOB.replace("RUN", str(tmp_path / "model")))
    plan = json.loads(veomni("plan", str(path), "--json"))
    sites = {op["op_name"]: [site["kernel"] for site in op["sites"]] for op in plan["ops"]}
    assert sites["rms_norm"] == ["torch"] * 3 and sites["attention"]

    veomni("train", str(path))
    assert len(_losses(tmp_path / "model")) == 3
    receipt = json.loads((tmp_path / "model" / "receipt.json").read_text())
    (norms,) = [op for op in receipt["ops"] if op["op"] == "rms_norm"]
    assert (norms["bound"], norms["found"]) == (3, 3)

    exported = tmp_path / "model" / "model"
    said = veomni("checkpoint", "inspect", str(exported), "--json")
    assert json.loads(said)["model"] == "AcmeParallelForCausalLM"
    (bound,) = [line for line in environment.run("-c", RELOAD, str(exported)).splitlines() if line.startswith("[")]
    assert "'rms_norm'" in bound and "'cross_entropy_loss'" in bound

    published, own = str(exported), str(tmp_path / "own")  # as RELOAD has stored it
    found = json.loads(veomni("checkpoint", "inspect", published, "--json"))
    assert found["converter"] == "AcmeCheckpointTensorConverter" and not (found["missing"] or found["extra"])
    veomni("checkpoint", "convert", published, own, "--layout", "fused")
    found = json.loads(veomni("checkpoint", "inspect", own, "--json"))
    assert found["converter"] is None and not (found["missing"] or found["extra"])
    assert "the same logits for 16 tokens, bit for bit" in veomni("checkpoint", "verify", published, own)
