"""The tokenizer that a job trains with: that of its weights, and never bytes by mistake; it stays with the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tokenizers import CHATML, MARKED, byte_level, sentence_piece
from transformers import AutoTokenizer, BertTokenizer, LlamaConfig, LlamaForCausalLM

from veomni_core import Hardware
from veomni_core.errors import ConfigError, JobFileError
from veomni_trainer.data.documents import Example
from veomni_trainer.data.tokens import ByteTokenizer, PretrainedTokenizer, has_tokenizer, load_tokenizer
from veomni_trainer.job.load import parse_job
from veomni_trainer.run.check import check_job
from veomni_trainer.setup.model import job_tokenizer, other_ids

pytestmark = pytest.mark.thorough

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(60)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``spoken``: weights with a tokenizer; ``mute``: weights without; ``wide``: those of a large vocabulary."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, vocabulary in {"spoken": 320, "mute": 320, "wide": 1000}.items():
        LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocabulary)).save_pretrained(root / name)
    byte_level(CHATML).save_pretrained(root / "spoken")
    return root


@pytest.fixture
def sft(job_data: dict[str, Any], models: Path, tmp_path: Path) -> dict[str, Any]:
    """A job that trains the weights with a tokenizer on chats."""
    lines = [json.dumps(chat) + "\n" for chat in CHATS]
    (tmp_path / "chats.jsonl").write_text("".join([*lines, "{broken\n"]), encoding="utf-8")
    job_data["model"] |= {"config": None, "weights": str(models / "spoken")}
    job_data["data"] = {"files": "chats.jsonl", "bad_lines": "skip", "sequence_length": 32}
    return job_data


def test_the_weights_tokenizer_is_the_default_and_stays_with_them(
    sft: dict[str, Any], train: Callable[..., bool], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft["train"] |= {"steps": 2, "export": True}
    train(sft)
    assert "60 documents, chats in column 'messages'" in capsys.readouterr().out
    text = "What is the weather?"
    for folder in (run / "checkpoint-2", run / "model"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == CHATML
        assert tokenizer(text)["input_ids"] == byte_level()(text)["input_ids"]
    (reading,) = json.loads((run / "summary.json").read_text(encoding="utf-8"))["data"]
    assert reading["bad_lines"] == 1
    assert reading["first_bad_lines"][0].endswith(
        "chats.jsonl, line 61: not JSON: Expecting property name enclosed in double quotes at column 2"
    )
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "left out: 1 bad lines (" in report and "chats.jsonl, line 61: not JSON" in report


def test_bytes_leave_no_tokenizer_behind(job_data: dict[str, Any], train: Callable[..., bool], run: Path) -> None:
    train(job_data, "train.steps=1", "train.export=true")
    assert not has_tokenizer(run / "checkpoint-1") and not has_tokenizer(run / "model")


def test_bytes_and_weights_with_a_tokenizer_exclude_each_other(
    sft: dict[str, Any], train: Callable[..., bool], write_job: Callable[[dict[str, Any]], Path], run: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer is bytes, but .*spoken comes with the tokenizer"
    ) as trained:
        train(sft, "data.tokenizer=bytes")
    sft["data"]["tokenizer"] = "bytes"
    with pytest.raises(ConfigError) as planned:
        check_job(write_job(sft), Hardware.cpu())
    assert str(planned.value) == str(trained.value)
    assert not run.exists()


def _chosen(job_data: dict[str, Any], weights: Path, **data: Any) -> Any:
    job_data["model"] |= {"config": None, "weights": str(weights)}
    job_data["data"] = {"files": "text", "sequence_length": 32, **data}
    return job_tokenizer(parse_job(job_data))


def test_weights_without_a_tokenizer_are_not_guessed_to_speak_bytes(job_data: dict[str, Any], models: Path) -> None:
    assert isinstance(_chosen(job_data, models / "mute"), ByteTokenizer)  # as many embeddings as our byte models have
    with pytest.raises(ConfigError, match=r"wide has 1,000 embeddings and comes without a tokenizer\. Write"):
        _chosen(job_data, models / "wide")
    assert isinstance(_chosen(job_data, models / "wide", tokenizer="bytes"), ByteTokenizer)
    assert isinstance(_chosen(job_data, models / "wide", tokenizer=str(models / "spoken")), PretrainedTokenizer)


def test_another_tokenizer_and_template_may_be_named(job_data: dict[str, Any], models: Path, tmp_path: Path) -> None:
    sentence_piece().save_pretrained(tmp_path / "other")
    (tmp_path / "mine.jinja").write_text(MARKED, encoding="utf-8")
    chosen = _chosen(
        job_data,
        models / "spoken",
        tokenizer=str(tmp_path / "other"),
        chat_template=str(tmp_path / "mine.jinja"),
    )
    assert chosen.vocab_size > 320
    assert chosen.chats.chat_template == MARKED


def test_a_tokenizer_of_another_vocabulary_is_named(job_data: dict[str, Any], models: Path, tmp_path: Path) -> None:
    more = AutoTokenizer.from_pretrained(models / "spoken")
    more.add_tokens(["<tool>"])
    for tokenizer, warned in ((sentence_piece(), True), (more, False)):
        tokenizer.save_pretrained(tmp_path / "other")
        chosen = _chosen(job_data, models / "spoken", tokenizer=str(tmp_path / "other"))
        warnings = other_ids(parse_job(job_data), chosen)
        assert [" tokens other ids than the tokenizer of model.weights" in each for each in warnings] == [True] * warned


def test_tokenizers_of_every_format_are_loaded(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    config = {"tokenizer_class": BertTokenizer.__name__}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.end) == (7, words.index("[SEP]"))
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(JobFileError, match=r"data\.tokenizer: .* can't be loaded as a tokenizer: "):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"config.json": {"eos_token_id": 2}}, "<|im_end|>"),
        ({"config.json": {"text_config": {"eos_token_id": [2, 0]}}}, "<|im_end|>"),
        ({"generation_config.json": {"eos_token_id": [999999, 2]}}, "<|im_end|>"),
        (
            {"special_tokens_map.json": {"eos_token": "<|im_start|>"}, "config.json": {"eos_token_id": 2}},
            "<|im_start|>",
        ),
        ({"config.json": {"eos_token_id": None}}, "<|endoftext|>"),
    ],
)
def test_the_end_that_is_stated_comes_before_a_usual_one(tmp_path: Path, files: dict[str, Any], end: str) -> None:
    byte_level().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.pretrained and tokenizer.pretrained.convert_ids_to_tokens(tokenizer.end) == end
    with pytest.raises(JobFileError, match=r"has no token '<nope>'\. Known: <\|endoftext\|>, <\|im_end\|>"):
        load_tokenizer(str(tmp_path), "<nope>")


def test_a_file_of_a_folder_is_the_tokenizer_of_that_folder(models: Path, tmp_path: Path) -> None:
    whole, file = load_tokenizer(str(models / "spoken")), load_tokenizer(str(models / "spoken" / "tokenizer.json"))
    assert whole.fingerprint == file.fingerprint
    alone = tmp_path / "mine.json"
    alone.write_bytes((models / "spoken" / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(str(alone))
    assert tokenizer.chats is None
    assert (tokenizer.end, whole.end) == (0, 2)  # the file alone states no end, and has one with a usual name
    tokenizer.save(tmp_path / "saved")
    text = [Example("the quick brown fox")]
    (again,) = load_tokenizer(str(tmp_path / "saved")).encode(text)
    assert again.ids.tolist() == tokenizer.encode(text)[0].ids.tolist()
