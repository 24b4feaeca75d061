"""``build_foundation_model``: from every kind of config, and every argument that it must refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from built_on_cpu import EAGER, LLAMA, build_on_cpu
from counting_kernels import counting_registry
from veomni_core import OpsConfig, binding_of, build_foundation_model
from veomni_core.errors import (
    ConfigError,
    HostError,
    JobFileError,
    KernelUnavailableError,
    MissingOpsImplementationError,
    UnknownNameError,
)


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


@pytest.mark.parametrize(
    "source, options, error, message",
    [
        ({"model_type": "lama"}, {}, UnknownNameError, r"model_type 'lama' is unknown\. Did you mean 'llama'"),
        ({"hidden_size": 8}, {}, ConfigError, r"model\.config: model_type is missing"),
        ("no/such/config.json", {}, JobFileError, r"there is no such model config"),
        ({"model_type": "vit"}, {}, ConfigError, r"no model of the type vit that writes text.*\[ViTModel\]"),
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


@pytest.mark.thorough
def test_config_kwargs_reach_a_config_of_the_hub(tmp_path):
    """A model in the Hub's cache, as a machine without a network has it."""
    snapshot = tmp_path / "hub" / "models--nobody--tiny" / "snapshots" / ("0" * 40)
    LlamaConfig(**LLAMA).save_pretrained(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    source = (
        "from veomni_transformers.jobs.model_config import load_model_config\n"
        "config = load_model_config('nobody/tiny', {'hidden_size': 64, 'head_dim': None, 'mine': 3})\n"
        "print(config.hidden_size, config.head_dim, config.mine, config.vocab_size)"
    )
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["64", "16", "3", str(LLAMA["vocab_size"])]


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(JobFileError, match=r"there is no config\.json in this folder"):
        build_on_cpu(tmp_path)
