"""What people get wrong in a model's config ends in one ConfigError that names the key, the value and what to do."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from veomni_core import build_foundation_model
from veomni_core.errors import ConfigError
from veomni_transformers.build import build_skeleton
from veomni_transformers.jobs.config_values import refuse_unfit_pairs, refuse_values

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {"llama": {"model_type": "llama", **SMALL}, "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **EXPERTS}}
# What is written, and what the message must say: the key, the value, and the reason or what to write.
MISTAKES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_hidden_layers": "two"}, ("num_hidden_layers", "'two'", "whole number of at least 1")),
    ({"num_hidden_layers": 0}, ("num_hidden_layers", "at least 1, got 0")),
    ({"num_hidden_layers": 2.5}, ("num_hidden_layers", "got 2.5")),
    ({"hidden_act": "foo"}, ("hidden_act: 'foo' is unknown", "silu")),
    ({"hidden_act": "sillu"}, ("hidden_act", "Did you mean 'silu'?")),
    ({"hidden_size": 0}, ("hidden_size", "at least 1, got 0")),
    ({"hidden_size": -32}, ("hidden_size", "got -32")),
    ({"hidden_size": True}, ("hidden_size", "got True")),
    ({"hidden_size": None}, ("hidden_size: None", "expected int")),
    ({"intermediate_size": -1}, ("intermediate_size", "got -1")),
    ({"intermediate_size": [48]}, ("intermediate_size: [48]", "expected int, got list")),
    ({"vocab_size": -5}, ("vocab_size", "got -5")),
    ({"vocab_size": "64"}, ("vocab_size", "'64', which is text; write a number without quotes")),
    ({"num_attention_heads": 0}, ("num_attention_heads", "at least 1, got 0")),
    ({"num_key_value_heads": 3}, ("num_key_value_heads: 3 does not divide num_attention_heads: 4", "1, 2, 4")),
    ({"num_key_value_heads": 8}, ("num_key_value_heads: 8 does not divide num_attention_heads: 4",)),
    ({"head_dim": 7}, ("head_dim: 7", "even rotary dimension")),
    ({"head_dim": 0}, ("head_dim", "at least 1, got 0")),
    ({"max_position_embeddings": 0}, ("max_position_embeddings", "got 0")),
    ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps", "'1e-6'", "1.0e-6")),
    ({"attention_dropout": 2.0}, ("attention_dropout", "from 0 to 1, got 2.0")),
    ({"pad_token_id": 100}, ("pad_token_id: 100", "vocab_size: 64", "Padding_idx must be within num_embeddings")),
    ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings: 'yes'", "expected bool")),
    ({"dtype": "float31"}, ("dtype: 'float31'", "no attribute 'float31'")),
    ({"layer_types": ["full"]}, ("layer_types: ['full']", "full_attention")),
    ({"rope_theta": "1e4"}, ("rope_theta", "'1e4'", "a number above 0")),
    ({"rope_scaling": {"factor": 2.0}}, ("rope_scaling", "without rope_type, transformers ignores factor")),
    ({"rope_parameters": {"rope_type": "yarn"}}, ("rope_parameters.rope_type: 'yarn'", "Missing required", "factor")),
    ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, ("rope_parameters.rope_type: 'foo'",)),
    ({"rope_parameters": "yarn"}, ("rope_parameters: 'yarn'", "doesn't match any type")),
]
OF_ONE_MODEL = [
    ("llama", {"hidden_size": 33}, ("hidden_size: 33", "num_attention_heads: 4", "not a multiple")),
    ("qwen3_moe", {"num_experts_per_tok": 9}, ("can't choose 9 of num_experts: 8", "at most 8")),
    ("qwen3_moe", {"num_experts": -3}, ("num_experts", "at least 0, got -3")),
    ("qwen3_moe", {"moe_intermediate_size": 0}, ("moe_intermediate_size", "at least 1, got 0")),
    ("qwen3_moe", {"decoder_sparse_step": 0}, ("decoder_sparse_step", "at least 1, got 0")),
    ("qwen3_moe", {"mlp_only_layers": 3}, ("mlp_only_layers: 3", "expected a list")),
]
EVERY = [(model, *mistake) for model in MODELS for mistake in MISTAKES] + OF_ONE_MODEL


@pytest.mark.parametrize("model, wrong, said", EVERY, ids=[f"{model}-{wrong}" for model, wrong, _ in EVERY])
def test_a_mistake_is_named_with_its_value_and_a_remedy(model, wrong, said):
    written = {**MODELS[model], **wrong}
    before = copy.deepcopy(written)
    with pytest.raises(ConfigError) as caught:
        build_skeleton(written)
    message = str(caught.value)
    assert message.startswith("model.config")
    assert all(words in message for words in said), message
    assert written == before  # transformers completes nested mappings in place


@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_wrong_is_built(model):
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    assert build_skeleton({**MODELS[model], **rope}).config.num_hidden_layers == 2


def test_a_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 0}')
    with pytest.raises(ConfigError, match=r"config.json: hidden_size: must be a whole number of at least 1, got 0"):
        build_skeleton(tmp_path)


def test_building_says_it_before_anything_else():
    with pytest.raises(ConfigError, match="model.config.num_hidden_layers: must be a whole number of at least 1"):
        build_foundation_model(
            MODELS["llama"],
            ops_implementation={"preset": "eager"},
            config_kwargs={"num_hidden_layers": "two"},
            init_device="meta",
        )


def test_overrides_of_a_config_object_are_named_as_what_they_are():
    config = CONFIG_MAPPING["llama"](**SMALL)
    with pytest.raises(ConfigError, match="config_kwargs.hidden_size: must be a whole number"):
        build_foundation_model(
            config, ops_implementation={"preset": "eager"}, config_kwargs={"hidden_size": "64"}, init_device="meta"
        )


def test_the_reason_of_transformers_is_the_errors_cause():
    with pytest.raises(ConfigError) as caught:
        build_skeleton({**MODELS["llama"], "hidden_size": 33})
    assert "not a multiple" in str(caught.value.__cause__)


def test_memory_that_is_missing_is_no_mistake_of_the_config(monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    config = CONFIG_MAPPING["llama"](**SMALL)
    skeleton = build_skeleton(config)
    monkeypatch.setattr("veomni_transformers.build._skeleton", lambda *args: skeleton)
    monkeypatch.setattr("transformers.LlamaForCausalLM._from_config", out_of_memory)
    monkeypatch.setattr("veomni_transformers.build.AutoModelForCausalLM.from_config", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        build_foundation_model(config, ops_implementation={"preset": "eager"}, init_device="cpu", device="cpu")


def test_defaults_of_every_model_type_are_in_range():
    for model_type in ("llama", "qwen3_moe", "xlnet", "lxmert", "gemma3_text", "deepseek_v3", "gpt2", "mamba"):
        config = CONFIG_MAPPING[model_type]()
        refuse_values(config.to_dict(), type(config), model_type)
        refuse_unfit_pairs(config, config.to_dict(), model_type)


@pytest.mark.thorough
def test_a_bug_in_code_that_comes_with_a_model_is_told_by_its_file_and_line(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "acme", "size": 8, "auto_map": {"AutoConfig": "acme_config.AcmeConfig"}}'
    )
    (tmp_path / "acme_config.py").write_text(
        textwrap.dedent("""\
            from transformers import PretrainedConfig


            class AcmeConfig(PretrainedConfig):
                model_type = "acme"

                def __init__(self, size=8, **kwargs):
                    super().__init__(**kwargs)
                    self.half = size.halved()  # a bug
            """)
    )
    asked = "from veomni_transformers.build import build_skeleton; "
    asked += f"build_skeleton({str(tmp_path)!r}, trust_remote_code=True)"
    env = {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, env=env, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("veomni_core.errors.ConfigError")
    assert "AttributeError: 'int' object has no attribute 'halved'" in last
    assert "acme_config.py, line 9, which is not part of transformers: correct that code" in last
