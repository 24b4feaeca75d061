"""Which class a config's model is built as: the whole model, its text decoder if that is named, an omni's thinker."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_multimodal import CONFIGS, text_batch, tiny_config, tiny_model
from transformers import CONFIG_MAPPING

from built_on_cpu import build_on_cpu
from veomni_core.errors import CheckpointError, ConfigError
from veomni_transformers.build import load_as_trained
from veomni_transformers.model_class import class_and_config


@pytest.mark.parametrize("model_type", ["qwen3_5", "mllama", "llama4", "whisper", "qwen3_vl", "qwen2_audio"])
def test_without_architectures_the_whole_model_is_built(model_type):
    model = build_on_cpu({"model_type": model_type, **CONFIGS[model_type]}, init_device="meta")
    assert type(model).__name__.endswith("ForConditionalGeneration")
    assert model.config.model_type == model_type


@pytest.mark.parametrize("model_type, written", [("qwen3_5", ["Qwen3_5ForCausalLM"]), ("llama4", "Llama4ForCausalLM")])
def test_a_text_decoder_is_built_where_it_is_named(model_type, written, tmp_path):
    whole = tiny_model(model_type).eval()
    whole.save_pretrained(tmp_path)
    config = tiny_config(model_type)
    config.architectures = written
    model = build_on_cpu(config, tmp_path).eval()
    assert model.__class__.__name__ in written and model.config.model_type == f"{model_type}_text"
    ids = text_batch()["input_ids"]
    torch.testing.assert_close(model(input_ids=ids).logits, whole(input_ids=ids).logits)


@pytest.mark.parametrize("model_type, whole, left_out", [
    ("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", ("talker.model.norm.weight", "token2wav.dit.weight")),
    ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", ("talker.model.norm.weight", "code2wav.weight")),
])  # fmt: skip
def test_of_an_omni_folder_the_thinker_is_trained(model_type, whole, left_out, tmp_path):
    thinker = tiny_model(f"{model_type}_thinker").eval()
    thinker.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    published = {f"thinker.{name}": value for name, value in load_file(file).items()}
    save_file(published | {name: torch.ones(2) for name in left_out}, file, {"format": "pt"})
    thinker_config = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": model_type, "architectures": [whole], "thinker_config": thinker_config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_on_cpu(tmp_path, tmp_path).eval()
    batch = text_batch()
    torch.testing.assert_close(model(**batch).loss, thinker(**batch).loss)
    assert type(load_as_trained(tmp_path)) is type(thinker)
    save_file({name: value for name, value in published.items() if "lm_head" not in name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: lm_head\.weight"):
        build_on_cpu(tmp_path, tmp_path)


def test_a_type_that_writes_no_text_is_refused_with_what_to_write():
    with pytest.raises(
        ConfigError, match=r"no model of the type t5 that .*architectures: \[T5ForConditionalGeneration\]"
    ):
        class_and_config(CONFIG_MAPPING["t5"]())
    with pytest.raises(ConfigError, match=r"of the type csm_depth_decoder_model that .*architectures: \["):
        class_and_config(CONFIG_MAPPING["csm_depth_decoder_model"]())
