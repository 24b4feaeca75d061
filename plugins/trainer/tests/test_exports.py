"""What is exported is what was trained: the same logits, and an end where training ended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from small_tokenizers import byte_level, saved
from test_equals_transformers import STEPS, losses_by_hand
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    set_seed,
)

from veomni_core.errors import CheckpointError
from veomni_trainer.output import export
from veomni_trainer.output.adapters import adapted_model
from veomni_trainer.output.trained_sample import read_sample
from veomni_transformers.build import load_as_trained

Train = Callable[..., bool]
CHATS = [
    {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
    for ask, answer in (("What is the weather?", "sunny"), ("the quick brown", "fox"))
]
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 128,
}


@pytest.fixture
def chat_data(tmp_path: Path, job_data: dict[str, Any]) -> dict[str, Any]:
    """A job that trains a tied base model, whose end is ``<|endoftext|>``, on chats that end with ``<|im_end|>``."""
    tokenizer = byte_level()
    tokenizer.eos_token = "<|endoftext|>"
    base = saved(tokenizer, tmp_path / "base")
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CHATS * 4), encoding="utf-8")
    job_data["model"] = {"weights": base, "ops_implementation": {"preset": "auto"}}
    job_data["data"] = {"files": "chats.jsonl", "sequence_length": 64}
    job_data["train"] |= {"export": True, "learning_rate": 0.05, "steps": 2}
    return job_data


@pytest.mark.parametrize(
    "method", ["pretrain", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("dpo", "kto", "orpo"))]
)
def test_the_export_of_chats_ends_as_their_turns_do(
    chat_data: dict[str, Any], train: Train, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    chat_data["train"]["method"] = method
    if method != "pretrain":
        turns = [each["messages"] for each in CHATS * 2]
        no = [{"role": "assistant", "content": "no"}]
        rows = (
            [{"prompt": ask, "completion": [answer], "label": bool(n % 2)} for n, (*ask, answer) in enumerate(turns)]
            if method == "kto"
            else [{"prompt": ask, "chosen": [answer], "rejected": no} for *ask, answer in turns]
        )
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    train(chat_data)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    turn, text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = AutoConfig.from_pretrained(run / "model")
    assert AutoModelForCausalLM.from_pretrained(run / "model").generation_config.eos_token_id == [turn, text]
    assert config.eos_token_id == [turn, text]
    said = capsys.readouterr().out
    assert "it ends at <|im_end|>, <|endoftext|>; the same logits as the trained model's, to" in said


@pytest.mark.parametrize(
    "places",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        pytest.param({"target_modules": ["embed_tokens", "q_proj"]}, marks=pytest.mark.thorough),
        pytest.param({"target_parameters": ["embed_tokens.weight"]}, marks=pytest.mark.thorough),
        pytest.param({"modules_to_save": ["lm_head"]}, marks=pytest.mark.thorough),
        pytest.param({"target_modules": ["q_proj"]}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_merged_adapter_of_a_tied_head_computes_what_was_trained(
    chat_data: dict[str, Any], train: Train, run: Path, places: dict[str, Any]
) -> None:
    chat_data["lora"] = {"rank": 4, **places}
    chat_data["train"] |= {"export": "merged"}
    train(chat_data)
    sample = read_sample(run / "checkpoint-2")
    assert sample is not None and sample.logits is not None
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(run / "model")(sample.ids[None]).logits[0]
        base = AutoModelForCausalLM.from_pretrained(chat_data["model"]["weights"])(sample.ids[None]).logits[0]
    rows = torch.linspace(0, len(sample.ids) - 1, len(sample.logits)).long()
    torch.testing.assert_close(merged[rows], sample.logits)
    assert sample.difference(base[rows]) > 0.005  # the adapter had learned something


def test_a_model_of_images_and_text_is_merged_as_the_class_that_was_trained(
    chat_data: dict[str, Any], train: Train, run: Path, tmp_path: Path
) -> None:
    text = {**SHAPE, "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_hidden_layers": 4}
    text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    model.save_pretrained(chat_data["model"]["weights"])
    chat_data["lora"] = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
    chat_data["train"] |= {"export": "merged"}
    train(chat_data)
    exported = load_as_trained(run / "model")
    assert type(exported).__name__ == "Qwen3_5ForConditionalGeneration"
    assert {*exported.state_dict()} == {*model.state_dict()}


def test_an_export_that_computes_something_else_is_not_written(
    chat_data: dict[str, Any], train: Train, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = export.load_as_trained

    def changed(*args: Any) -> Any:
        model = original(*args)
        model.model.layers[0].mlp.down_proj.weight.data.mul_(2)
        return model

    monkeypatch.setattr(export, "load_as_trained", changed)
    with pytest.raises(CheckpointError, match="compute other logits than the trained model: they differ by"):
        train(chat_data)
    assert not (run / "model").exists() and not [*run.glob(".model*")]


def test_an_adapter_s_export_needs_every_weight_of_it(chat_data: dict[str, Any], train: Train, run: Path) -> None:
    from safetensors.torch import load_file, save_file

    chat_data["lora"] = {"rank": 4, "target_modules": ["q_proj"]}
    train(chat_data)
    path = run / "checkpoint-2" / "adapter_model.safetensors"
    weights = load_file(path)
    weights["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = weights.popitem()[1]
    save_file(weights, path)
    with pytest.raises(CheckpointError, match="does not fit"):
        export.export_checkpoint(run / "checkpoint-2", run / "other", merges_adapter=True)


def test_added_tokens_get_embeddings_that_are_trained_exported_and_resumed(
    chat_data: dict[str, Any], train: Train, run: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_data["model"]["weights"])
    tokenizer.add_tokens([f"<tool-{number}>" for number in range(384 - len(tokenizer) + 1)])
    chat_data["data"]["tokenizer"] = saved(tokenizer, tmp_path / "more")
    with pytest.raises(Exception, match=r"has 385 tokens\. Write model\.resize_embeddings: true"):
        train(chat_data)
    chat_data["model"]["resize_embeddings"] = True
    train(chat_data)
    assert AutoModelForCausalLM.from_pretrained(run / "model").get_input_embeddings().num_embeddings == 448
    train(chat_data, "train.steps=3", resume=True)
    assert (run / "checkpoint-3").is_dir()


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_an_adapter_trains_exports_resumes_and_merges_added_tokens(
    chat_data: dict[str, Any], train: Train, losses: Any, run: Path, tmp_path: Path, tied: bool
) -> None:
    """Its losses are those of PEFT by hand, with the tables of words trained whole."""
    base = chat_data["model"]["weights"]
    if not tied:
        config = AutoConfig.for_model("llama", **SHAPE)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<tool-{number}>" for number in range(384 - len(tokenizer) + 1)])
    (tmp_path / "tools.txt").write_text("the quick brown <tool-1> jumps over <tool-2>. " * 90, encoding="utf-8")
    chat_data["data"] = {"files": "tools.txt", "sequence_length": 32, "tokenizer": saved(tokenizer, tmp_path / "more")}
    chat_data["model"]["resize_embeddings"] = True
    chat_data["lora"] = {"rank": 4}
    chat_data["train"] |= {"steps": STEPS, "save_every": STEPS // 2, "learning_rate": 0.01}
    set_seed(0)
    resized = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    resized.resize_token_embeddings(448)
    set_seed(0)
    words = ["model.embed_tokens", "lm_head"]
    settings = LoraConfig(r=4, target_modules="all-linear", modules_to_save=words, task_type="CAUSAL_LM")
    hand = losses_by_hand(chat_data, get_peft_model(resized, settings), {"learning_rate": 0.01}, tmp_path)
    train(chat_data)
    found = losses(run)
    assert dict(found) == pytest.approx(hand, rel=1e-5)
    assert sum("lora" not in name for name in load_file(run / "model" / "adapter_model.safetensors")) == 2
    adapted = adapted_model(run / "model", False)
    new = adapted.get_input_embeddings().weight[384]
    assert adapted.get_output_embeddings().weight.shape[0] == 448
    shutil.rmtree(run / f"checkpoint-{STEPS}")
    train(chat_data, "train.export=merged", resume=True)
    assert losses(run) == found
    merged = AutoModelForCausalLM.from_pretrained(run / "model")
    assert torch.equal(merged.get_input_embeddings().weight[384], new)
