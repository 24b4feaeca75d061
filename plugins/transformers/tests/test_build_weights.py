"""``build_foundation_model`` with weights: what is loaded, and every checkpoint that it must refuse."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from built_on_cpu import build_on_cpu
from counting_kernels import counting_registry
from models import build, step, tokens
from veomni_core import OpsConfig, binding_of, build_foundation_model
from veomni_core.errors import CheckpointError, ConfigError, JobFileError, KernelUnavailableError


@pytest.fixture
def checkpoint(tmp_path):
    """A saved model with its config."""
    build("llama").save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_weights_are_loaded_and_the_model_computes_what_was_saved(checkpoint):
    saved, model = build("llama").eval(), build_on_cpu(checkpoint, checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, saved(tokens()).logits)


def test_experts_survive_saving_and_loading(tmp_path):
    """Checkpoints name experts one by one, the model holds them in two tensors."""
    saved = build("qwen3_moe")
    saved.save_pretrained(tmp_path)
    ops = OpsConfig.from_dict({"preset": "eager", "moe_implementation": "one"}, counting_registry("one"))
    model = build_on_cpu(tmp_path, tmp_path, ops=ops).train()
    torch.testing.assert_close(step(model), step(saved))


def test_refusals_come_before_a_weight_is_loaded(checkpoint, monkeypatch):
    def load(*args, **options):
        raise AssertionError("weights were touched")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", load)
    with pytest.raises(KernelUnavailableError, match="npu can't run here|npu is not installed"):
        build_on_cpu(checkpoint, checkpoint, ops={"preset": "eager", "rms_norm_implementation": "npu"})


def test_weights_without_a_config_json_load_beside_a_config(checkpoint):
    saved, config = build("llama").eval(), LlamaConfig.from_pretrained(checkpoint)
    for path in checkpoint.glob("*.json"):
        path.unlink()
    with torch.no_grad():
        torch.testing.assert_close(build_on_cpu(config, checkpoint)(tokens()).logits, saved(tokens()).logits)


def test_weights_alone_do_not_say_which_model_they_are_of(checkpoint):
    (checkpoint / "config.json").unlink()
    message = (
        r"checkpoint holds weights and no config\.json, .* Give the model's config \(model\.config, or config_path\)"
    )
    with pytest.raises(JobFileError, match=message):
        build_on_cpu(checkpoint, checkpoint)


def test_quantized_weights_run_with_the_kernels_planned_for_whole_ones(checkpoint):
    pytest.importorskip("bitsandbytes")
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    ops = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": "one"}, counting_registry("one"))
    model = build_on_cpu(checkpoint, checkpoint, ops=ops, quantization_config=quantized)
    whole = build_on_cpu(checkpoint, checkpoint, ops=ops)
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    assert binding_of(model).plan == binding_of(whole).plan and not binding_of(model).receipt.changed
    with pytest.raises(ConfigError, match="it needs weights_path, and no distributed_config"):
        build_on_cpu(checkpoint, ops=ops, quantization_config=quantized)


def test_weights_are_not_loaded_onto_meta(checkpoint):
    message = (
        r"init_device is meta, .* weights_path is .*checkpoint\. Leave weights_path out .* or write init_device='cuda'"
    )
    with pytest.raises(ConfigError, match=message):
        build_on_cpu(checkpoint, checkpoint, init_device="meta")


def _edit(checkpoint, change):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.norm.weight"), r"missing keys: model\.norm\.weight"),
        (lambda t: t.update(surplus=torch.zeros(1)), r"unexpected keys: surplus"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), r"mismatched keys: .*model\.norm\.weight"),
    ],
    ids=["missing", "unexpected", "mismatched"],
)
def test_a_checkpoint_that_does_not_fit(checkpoint, change, message):
    _edit(checkpoint, change)
    with pytest.raises(CheckpointError, match=f"does not fit this model: {message}"):
        build_on_cpu(checkpoint, checkpoint)


def test_a_checkpoint_that_is_not_there_or_broken(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a folder with \*\.safetensors files"):
        build_on_cpu(checkpoint, tmp_path)
    (checkpoint / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
        build_on_cpu(checkpoint, checkpoint)


def test_pickled_weights_are_not_read_in_place_of_safetensors(checkpoint):
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    torch.save(model.state_dict(), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").rename(checkpoint / "others.safetensors")
    with pytest.raises(CheckpointError, match="no file named model.safetensors"):
        build_foundation_model(checkpoint, checkpoint, ops_implementation={"preset": "eager"}, init_device="cpu")
