"""A bound model's config is its own: edits go with the model, undo takes back what bind set and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models import assert_same_bits, build, step, tokens
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, bind, binding_of, find_sites
from veomni_core.discovery.registry import PluginRecord, build_registry


def registry():
    sdpa = KernelSpec("sdpa", "attention", "standard", f"{__name__}:sdpa", features=("dense_mask", "sdpa_mask"))
    masked = dataclasses.replace(sdpa, name="masked", mask=f"{__name__}:mask", features=("dense_mask",))
    specs = (sdpa, masked)
    return build_registry([*definitions(), PluginRecord("one", "veomni-one", "1.0", __name__, kernels=specs)], {})


def sdpa(module, query, key, value, attention_mask, **options):
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def mask(**call):
    return sdpa_mask(**{**call, "allow_is_causal_skip": False})


def bound(model, kernel="sdpa"):
    return bind(model, {"preset": "eager", "attn_implementation": kernel}, registry=registry())


def names():
    return [
        {name: id(function) for name, function in table._global_mapping.items()}
        for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    ]


@pytest.fixture(autouse=True)
def nothing_is_left_by_earlier_tests():
    gc.collect()


def test_edits_since_bind_stay_after_undo_as_in_a_model_that_was_never_bound(tmp_path):
    model, unbound = build("llama"), build("llama")
    shared = model.config
    binding = bound(model)
    assert model.config is not shared
    for edited in (model, unbound):
        torch.manual_seed(2)
        edited.resize_token_embeddings(72)
        edited.config.use_cache = False
        edited.config.pad_token_id = 5
        edited.config.further = {"a": 1}
        del edited.config.tie_word_embeddings
    binding.undo()
    assert model.config is shared
    assert all(module.config is shared for module in model.modules() if "config" in vars(module))
    assert vars(model.config) == vars(unbound.config)
    model.set_attn_implementation("eager")
    unbound.set_attn_implementation("eager")
    assert_same_bits(step(model), step(unbound))
    del model.config.further
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.shape[0] == 72


def test_undo_restores_every_config_without_edits():
    model = build("llama")
    shared, before = model.config, copy.deepcopy(vars(model.config))
    bound(model).undo()
    assert model.config is shared and vars(shared) == before
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_veomni")]


def test_nested_configs_are_edited_and_restored_like_the_outer_one():
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    shared, shared_text = model.config, model.config.text_config
    binding = bound(model)
    assert model.config.text_config is model.get_decoder().config and model.config.text_config is not shared_text
    assert shared_text._attn_implementation == model.config.text_config._attn_implementation == "sdpa"
    model.resize_token_embeddings(72)
    binding.undo()
    assert model.config is shared and shared.text_config is shared_text is model.get_decoder().config
    assert shared_text.vocab_size == 72


def test_an_attention_that_is_set_after_bind_runs_and_stays_and_is_said_once(caplog):
    model, eager = build("llama", attn_implementation="sdpa"), build("llama", attn_implementation="eager")
    binding = bound(model)
    assert not binding.receipt.changed
    model.set_attn_implementation("eager")
    assert_same_bits(step(model), step(eager))
    with caplog.at_level(logging.WARNING, logger="veomni_core"):
        assert binding.receipt.changed == {"the model": "its attention was set to eager"}
        assert "its attention was set to eager" in binding.receipt.to_json()
        binding.undo()
    assert sum("its attention was set to eager" in record.message for record in caplog.records) == 1
    assert model.config._attn_implementation == "eager"


def test_eager_that_was_asked_for_and_set_otherwise_is_said():
    model = build("llama", attn_implementation="eager")
    binding = bind(model, {"preset": "eager"})
    model.set_attn_implementation("sdpa")
    assert binding.receipt.changed == {"the model": "its attention was set to sdpa"}
    binding.undo()
    assert model.config._attn_implementation == "sdpa"


def test_a_bound_model_saves_no_name_of_ours(tmp_path):
    model, other = build("llama"), build("llama")
    bound(model)
    model.save_pretrained(tmp_path)
    assert "veomni" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").train()
    other.set_attn_implementation("sdpa")
    assert_same_bits(step(loaded), step(other))
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 64


def test_registries_are_as_before_after_find_sites_and_after_undo():
    model, before = build("llama"), names()
    find_sites(model)
    assert names() == before
    with bound(model):
        assert names() == before
    binding = bound(model, "masked")
    assert names() != before
    binding.undo()
    assert names() == before


def test_a_name_is_kept_while_any_model_uses_it():
    before = names()
    one, two = build("llama"), build("llama")
    first, second = bound(one, "masked"), bound(two, "masked")
    copied = copy.deepcopy(two)
    first.undo()
    second.undo()
    assert names() != before
    copied(input_ids=tokens())  # runs under its name
    del copied
    gc.collect()
    assert names() == before


def test_a_bound_model_that_is_freed_gives_its_names_back():
    before = names()
    model = build("llama")
    bound(model, "masked")
    config = model.config
    del model
    gc.collect()
    assert names() == before
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "sdpa"


OTHERS = ("llama", "gemma3_text", "mixtral", "phi3")


def in_another_process(config):
    """What the attention of a model is that is built there."""
    source = "import pickle, sys, transformers as T; C = pickle.load(sys.stdin.buffer)"
    source += "; print(T.AutoModelForCausalLM.from_config(C).config._attn_implementation)"
    run = subprocess.run([sys.executable, "-c", source], input=pickle.dumps(config), capture_output=True, check=True)
    return run.stdout.decode().strip()


@pytest.mark.parametrize("kernel", ["sdpa", "masked"])
@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)],
)
def test_what_leaves_with_the_config_runs_without_a_binding(family, kernel):
    model, eager = build(family), build(family)
    wanted = step(eager)
    binding = bound(model, kernel)
    config, plain = model.config, eager.config
    kept = copy.deepcopy(config), copy.copy(config), pickle.loads(pickle.dumps(config))
    assert {(each._attn_implementation, type(each)) for each in kept} == {("sdpa", type(plain))}
    assert config.to_dict() == plain.to_dict() and config.to_json_string() == plain.to_json_string()
    second = AutoModelForCausalLM.from_config(config)  # on the config itself, not on a copy
    second.load_state_dict(model.state_dict())
    duplicate = copy.deepcopy(model)
    assert second.config._attn_implementation == "sdpa" and binding_of(second) is None
    assert_same_bits(step(second), wanted)
    assert_same_bits(step(model), step(duplicate))
    assert not binding.receipt.changed and not binding_of(duplicate).receipt.changed
    binding.undo()
    assert model.config._attn_implementation == "sdpa" and type(model.config) is type(plain)
    assert_same_bits(step(model), wanted)
    assert_same_bits(step(second.train()), wanted)
    duplicate.set_attn_implementation("eager")
    assert list(binding_of(duplicate).receipt.changed.values()) == ["its attention was set to eager"]
    binding_of(duplicate).undo()
    assert type(duplicate.config) is type(plain) and duplicate.config._attn_implementation == "eager"


@pytest.mark.thorough
def test_a_config_of_a_bound_model_can_be_used_in_another_process():
    model = build("llama")
    bound(model, "masked")
    assert in_another_process(model.config) == "sdpa"
