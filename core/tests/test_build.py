"""``build_foundation_model``: from every kind of source, with and without weights, and every way it must refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from counting_kernels import counting_registry
from models import build, step, tokens
from veomni_core import OpsConfig, binding_of, build_foundation_model
from veomni_core.errors import (
    CheckpointError,
    ConfigError,
    HostError,
    JobFileError,
    KernelUnavailableError,
    MissingOpsImplementationError,
    UnknownNameError,
)

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
EAGER = {"preset": "eager"}


def build_on_cpu(source, weights=None, *, ops=EAGER, **options):
    options = {"init_device": "cpu", "torch_dtype": "float32", **options}
    return build_foundation_model(source, weights, ops_implementation=ops, **options)


@pytest.fixture
def checkpoint(tmp_path):
    """A saved model with its config."""
    build("llama").save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def sources(tmp_path):
    config = LlamaConfig(**LLAMA)
    config.save_pretrained(tmp_path)
    return {
        "folder": str(tmp_path),
        "file": tmp_path / "config.json",
        "config": config,
        "mapping": {"model_type": "llama", **LLAMA},
    }


@pytest.mark.parametrize("kind", ["folder", "file", "config", "mapping"])
def test_every_kind_of_config(sources, kind):
    model = build_on_cpu(sources[kind], config_kwargs={"num_hidden_layers": 3})
    assert isinstance(model, LlamaForCausalLM)
    assert len(model.model.layers) == 3
    assert sources["config"].num_hidden_layers == 2, "a given config is copied"


def test_kernels_are_bound_and_the_receipt_is_at_hand(sources):
    ops = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": "one"}, counting_registry("one"))
    model = build_on_cpu(sources["config"], ops=ops)
    receipt = {op["op"]: op for op in binding_of(model).receipt.to_dict()["ops"]}
    assert (receipt["rms_norm"]["chosen"], receipt["rms_norm"]["bound"]) == (["one"], 5)
    assert model.lm_head.weight.dtype == torch.float32


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


def test_meta_holds_shapes_and_no_weight(sources):
    model = build_on_cpu(sources["config"], init_device="meta", torch_dtype="bfloat16")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert binding_of(model).plan.sha256


def test_architectures_in_the_config_choose_the_class():
    config = LlamaConfig(**LLAMA, architectures=["LlamaForSequenceClassification"], num_labels=3)
    assert isinstance(build_on_cpu(config), LlamaForSequenceClassification)


def test_attn_implementation_overrides_the_field(sources):
    registry = OpsConfig.from_dict(EAGER).registry
    model = build_on_cpu(sources["config"], attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    if "sdpa" in {spec.name for spec in registry.kernels("attention")}:
        model = build_on_cpu(sources["config"], attn_implementation="sdpa")
        assert "sdpa" in model.config._attn_implementation


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a refusal that a GPU with FlashAttention doesn't give")
def test_a_retired_name_of_attention_means_the_kernel(sources):
    name = "veomni_flash_attention_2_with_sp"
    with (
        pytest.warns(FutureWarning, match=f"attn_implementation: {name} is now called flash_attention_2"),
        pytest.raises(KernelUnavailableError, match="attn_implementation: flash_attention_2 "),
    ):
        build_on_cpu(sources["config"], attn_implementation=name)


def test_nothing_runs_all_eager_unasked(sources):
    with pytest.raises(MissingOpsImplementationError, match=r"needs ops_implementation, e\.g\. \{'preset': 'auto'\}"):
        build_foundation_model(sources["config"], init_device="cpu")


def test_refusals_come_before_a_weight_is_loaded(checkpoint, monkeypatch):
    def load(*args, **options):
        raise AssertionError("weights were touched")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", load)
    with pytest.raises(KernelUnavailableError, match="npu can't run here|npu is not installed"):
        build_on_cpu(checkpoint, checkpoint, ops={"preset": "eager", "rms_norm_implementation": "npu"})


@pytest.mark.parametrize(
    "source, options, error, message",
    [
        ({"model_type": "lama"}, {}, UnknownNameError, r"model_type 'lama' is unknown\. Did you mean 'llama'"),
        ({"hidden_size": 8}, {}, ConfigError, r"model\.config: model_type is missing"),
        ("no/such/config.json", {}, JobFileError, r"there is no such model config"),
        ({"model_type": "vit"}, {}, ConfigError, r"vit has no causal language model"),
        ({"model_type": "llama", **LLAMA}, {"torch_dtype": "bf16"}, ConfigError, r"torch_dtype: 'bf16' is unknown"),
        ({"model_type": "llama", **LLAMA}, {"init_device": "gpu"}, ConfigError, r"init_device: 'gpu' is not a device"),
    ],
)
def test_bad_arguments(source, options, error, message):
    with pytest.raises(error, match=message):
        build_on_cpu(source, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that must not be there")
def test_a_gpu_that_is_not_here(sources):
    with pytest.raises(HostError, match="init_device is cuda, but torch sees no CUDA device here"):
        build_on_cpu(sources["config"], init_device="cuda")


def test_a_file_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{model_type: llama")
    with pytest.raises(JobFileError, match="not a JSON model config"):
        build_on_cpu(tmp_path)


def test_a_hub_id_that_cannot_be_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment at import
    with pytest.raises(HostError, match="neither a local path nor a model that can be fetched from the Hub"):
        build_on_cpu("nobody/no-such-model")


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "configuration_mine.py").write_text(
        "from transformers import PretrainedConfig\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class MineConfig(PretrainedConfig):\n    model_type = 'mine'\n"
    )
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"asks to run code that comes with the model.*trust_remote_code=True"):
        build_on_cpu(tmp_path)
    assert not ran.exists()


REMOTE = """
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

    def __init__(self, hidden_size=32, **others):
        super().__init__(hidden_size=hidden_size, **others)
        self.doubled = 2 * hidden_size

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_config_kwargs_reach_a_config_that_comes_with_code(tmp_path):
    (tmp_path / "mine.py").write_text(REMOTE)
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes, **LLAMA}))
    options = {"trust_remote_code": True, "config_kwargs": {"num_hidden_layers": 1, "hidden_size": 16}}
    model = build_on_cpu(tmp_path, **options)
    assert type(model).__name__ == "MineForCausalLM"
    assert len(model.model.layers) == 1
    assert (model.config.hidden_size, model.config.doubled) == (16, 32), "what is computed from a size follows it"
    assert model.config.vocab_size == LLAMA["vocab_size"]


def test_config_kwargs_reach_a_config_of_the_hub(tmp_path):
    """A model in the Hub's cache, as a machine without a network has it."""
    snapshot = tmp_path / "hub" / "models--nobody--tiny" / "snapshots" / ("0" * 40)
    LlamaConfig(**LLAMA).save_pretrained(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    source = (
        "from veomni_core.jobs.model_config import load_model_config\n"
        "config = load_model_config('nobody/tiny', {'hidden_size': 64, 'head_dim': None, 'mine': 3})\n"
        "print(config.hidden_size, config.head_dim, config.mine, config.vocab_size)"
    )
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64", "16", "3", str(LLAMA["vocab_size"])]


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


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(JobFileError, match=r"there is no config\.json in this folder"):
        build_on_cpu(tmp_path)


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
