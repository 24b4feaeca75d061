"""The example patches on the installed transformers: what they generate computes what upstream's code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from counting_kernels import calls, counting_registry
from models import build, step
from veomni_core import bind, build_foundation_model
from veomni_core.errors import HostError, JobFileError
from veomni_patchgen import PatchError, generate
from veomni_patchgen.cli import patchgen
from veomni_patchgen.drift import drifted
from veomni_patchgen.patch_file import configs_in, load_patches
from veomni_patchgen.proof import prove
from veomni_patchgen.source import Source, read_source
from veomni_trainer.job.load import load_job
from veomni_trainer.run.run_job import run_job
from veomni_transformers.generated_modeling import generated_class
from veomni_transformers.jobs.model_config import load_model_config

EXAMPLES = Path(__file__).parents[1] / "examples" / "patches"


def config_of(name):
    return configs_in(load_patches(str(EXAMPLES / f"{name}.py")))["config"]


def model_of(name, folder, *, training=True):
    """The generated model of an example with random weights, and the inputs of a step."""
    patchgen([str(EXAMPLES / f"{name}.py")], output=folder)
    config = config_of(name)
    sizes, inputs = config.make_example()
    kind = generated_class(folder / config.target_file, load_model_config(sizes))
    torch.manual_seed(0)
    return kind._from_config(load_model_config(sizes), dtype=torch.float32).train(training), inputs


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        pytest.param("qwen3_vl", marks=pytest.mark.thorough),
        pytest.param("deepseek_v3", marks=pytest.mark.thorough),
    ],
)
def test_an_example_computes_what_upstream_does(name):
    proof = prove(config_of(name))
    assert proof.farthest < 1e-9 and proof.gradients > 20 and proof.declared is None


@pytest.mark.thorough
def test_a_patch_that_computes_something_else_is_found_or_declared():
    config = config_of("qwen3_moe")
    norm = next(patch for patch in config.patches if "RMSNorm" in patch.target)
    config.patches.remove(norm)
    wrong = load_patches(str(Path(__file__).with_name("wrong_norm.py")))
    config.override_method("Qwen3MoeRMSNorm.forward", replacement=wrong.forward)
    with pytest.raises(PatchError, match="computes something else: .* is .* from upstream's"):
        prove(config)
    del config.patches[-1]
    config.override_method("Qwen3MoeRMSNorm.forward", replacement=wrong.forward, declares="no eps, as in the paper")
    proof = prove(config)
    assert proof.farthest < 1e-9 and proof.declared > 1e-5 and "with them" in str(proof)


@pytest.mark.thorough
def test_slots_of_a_generated_file_hold_each_models_own_kernel(tmp_path):
    one, inputs = model_of("qwen3_moe", tmp_path)
    two, _ = model_of("qwen3_moe", tmp_path)
    eager, _ = model_of("qwen3_moe", tmp_path)
    assert type(one) is type(two)
    registry = counting_registry("one", "two", ops=("rms_norm", "swiglu_mlp", "rotary_pos_emb", "moe_experts"))
    fields = ("rms_norm", "swiglu_mlp", "rotary_pos_emb", "moe")
    for model, kernel in ((one, "one"), (two, "two")):
        asked = {f"{field}_implementation": kernel for field in fields}
        bind(model, {"preset": "eager", **asked}, registry=registry)
    calls.clear()
    losses = [model(**inputs).loss.item() for model in (one, two, eager)]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5) and losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert calls[("rms_norm", "standard", "one")] == calls[("rms_norm", "standard", "two")] == 9
    assert calls[("moe_experts", "standard", "one")] == calls[("swiglu_mlp", "standard", "two")] == 1
    assert calls[("rotary_pos_emb", "full", "one")] == 2


@pytest.mark.thorough
def test_a_generated_model_loads_and_saves_experts_as_they_are_published(tmp_path):
    upstream = build("qwen3_moe")
    upstream.save_pretrained(tmp_path / "weights")
    patchgen([str(EXAMPLES / "qwen3_moe.py")], output=tmp_path)
    model = build_foundation_model(
        str(tmp_path / "weights"),
        tmp_path / "weights",
        ops_implementation={"preset": "eager", "moe_implementation": "grouped_mm"},
        torch_dtype="float32",
        init_device="cpu",
        device="cpu",
        modeling=tmp_path / "patched_modeling_qwen3_moe.py",
    )
    (wanted, gradients), (loss, found) = step(upstream), step(model.train())
    assert torch.allclose(loss, wanted) and all(torch.allclose(found[k], gradients[k], atol=1e-6) for k in gradients)
    model.save_pretrained(tmp_path / "saved")
    stored = [load_file(tmp_path / name / "model.safetensors") for name in ("weights", "saved")]
    assert stored[0].keys() == stored[1].keys() and any(".experts.0.gate_proj" in name for name in stored[0])
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])


@pytest.mark.thorough
def test_a_batch_of_text_reaches_every_weight_of_the_vision_tower(tmp_path):
    model, inputs = model_of("qwen3_vl", tmp_path)
    model(**inputs).loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    assert not any(grad.any() for name, grad in grads.items() if "visual" in name)
    upstream, _ = model_of("qwen3_vl", tmp_path)
    calls_of_the_tower = []
    upstream.eval().model.visual.register_forward_hook(lambda *_: calls_of_the_tower.append(1))
    with torch.no_grad():
        upstream(**inputs)
    assert not calls_of_the_tower, "evaluation doesn't wait for others"


@pytest.mark.thorough
def test_a_change_in_transformers_own_file_is_named(tmp_path):
    config = config_of("qwen3_moe")
    patchgen([str(EXAMPLES / "qwen3_moe.py")], output=tmp_path)
    source = read_source(config.source_module)
    line = "        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
    assert line in source.text
    newer = Source(source.name, source.text.replace(line, "        x = x.clone()\n" + line), "9.9")
    said = "\n".join(drifted(generate(config, newer), tmp_path))
    assert "moved under override_method Qwen3MoeMLP.forward" in said and "+        x = x.clone()" in said
    with pytest.raises(PatchError, match="no class Qwen3MoeExperts. Did you mean 'Qwen3MoeExpertGroup'"):
        generate(config, Source(source.name, source.text.replace("Qwen3MoeExperts", "Qwen3MoeExpertGroup")))


@pytest.mark.thorough
def test_a_job_trains_a_generated_model_as_transformers_own(tmp_path):
    patchgen([str(EXAMPLES / "qwen3_moe.py")], output=tmp_path / "generated")
    file = tmp_path / "generated" / "patched_modeling_qwen3_moe.py"
    sizes, _ = config_of("qwen3_moe").make_example()
    del sizes["vocab_size"]
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    job = {
        "model": {"config": sizes, "dtype": "float32", "ops_implementation": {"preset": "eager"}},
        "data": {"files": "text.txt", "tokenizer": "bytes", "sequence_length": 16},
        "train": {
            "output_dir": str(tmp_path / "run"),
            "steps": 3,
            "batch_size": 2,
            "device": "cpu",
            "learning_rate": 0.01,
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))

    def losses(*changes):
        run_job(load_job(tmp_path / "job.yaml", changes), overwrite=True)
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]

    named, slots = (
        "model.modeling=generated/patched_modeling_qwen3_moe.py",
        "model.ops_implementation.moe_implementation",
    )
    upstream = losses()
    assert len(upstream) == 3 and losses(named) == pytest.approx(upstream, rel=1e-5)
    assert losses(named, f"{slots}=grouped_mm") == pytest.approx(upstream, rel=1e-5)
    receipt = (tmp_path / "run" / "receipt.json").read_text()
    assert "declared" in receipt and "grouped_mm" in receipt
    with pytest.raises(JobFileError, match="modeling"):
        load_job(tmp_path / "job.yaml", ["model.modeling=3"])
    file.write_text(file.read_text().replace('"version": "5', '"version": "4'))
    with pytest.raises(HostError, match="was generated for transformers 4"):
        losses(named)
