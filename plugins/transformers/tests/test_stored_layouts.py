"""Experts that a checkpoint stores transposed are loaded as the model has them, or refused, whichever is square."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from built_on_cpu import build_on_cpu
from veomni_core.errors import CheckpointError
from veomni_transformers.build import load_as_trained

FEW = pytest.mark.thorough(one_per=[])
SQUARE = {"2I = H": 16, "I = H": 32, "neither": 24}  # of the width 32


def vision_and_text(intermediate):
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    text |= {"moe_intermediate_size": intermediate, "rope_parameters": rope}
    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return Qwen3VLMoeForConditionalGeneration(config).eval()


def save(model, folder, turned=lambda name: False):
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "experts." in name and turned(name):
            tensors[name] = tensor.transpose(-1, -2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def differing(model, other):
    wanted = dict(other.named_parameters())
    return [name for name, p in model.named_parameters() if not torch.equal(p, wanted[name])]


@pytest.mark.parametrize("stored", ["transposed", "as the model has them"])
@pytest.mark.parametrize("intermediate", [pytest.param(each, id=name) for name, each in SQUARE.items()])
def test_experts_are_loaded_as_the_model_has_them(intermediate, stored, tmp_path):
    model = vision_and_text(intermediate)
    folder = save(model, tmp_path, lambda name: stored == "transposed")
    loaded = build_on_cpu(folder, folder, torch_dtype="float32")
    assert not differing(loaded, model)
    assert not differing(load_as_trained(folder), model)
    if stored == "transposed":  # saved as the model has them
        again = save(loaded, tmp_path / "again")
        assert not differing(build_on_cpu(again, again, torch_dtype="float32"), model)


@FEW
def test_a_checkpoint_that_stores_some_transposed_is_refused(tmp_path):
    folder = save(vision_and_text(16), tmp_path, lambda name: ".layers.0." in name)
    with pytest.raises(CheckpointError, match=r"transposed and .* not, so it can't be told how .*gate_up_proj"):
        build_on_cpu(folder, folder)


def test_what_can_not_be_transposed_after_loading_is_refused(tmp_path):
    folder = save(vision_and_text(16), tmp_path, lambda name: True)
    with pytest.raises(CheckpointError, match="gate_up_proj transposed, which transformers can.t see"):
        build_on_cpu(folder, folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


@FEW
@pytest.mark.parametrize("kind", [Qwen3MoeConfig, MixtralConfig])
@pytest.mark.parametrize("intermediate", [16, 32])
def test_models_whose_experts_are_never_transposed_refuse_such_a_checkpoint(kind, intermediate, tmp_path):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"vocab_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    wide = {"intermediate_size": intermediate, "moe_intermediate_size": intermediate}
    model = AutoModelForCausalLM.from_config(kind(**small, **wide))
    model.config.save_pretrained(tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj")) and tensors[name].dim() == 3]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="does not fit this model: mismatched keys"):
        build_on_cpu(tmp_path, tmp_path)
