"""Rows of TRL's methods: which of their columns and tokens are learned, and what is refused or named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import byte_level, saved

from veomni_core.errors import JobFileError
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.documents import Example
from veomni_trainer.data.rows import check_answers, read_rows
from veomni_trainer.data.tokens import PretrainedTokenizer, load_tokenizer
from veomni_trainer.job.load import parse_job
from veomni_trainer.job.source_keys import Source
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.setup.trl_arguments import trl_tokenizer

Write = Callable[..., Path]
CHAT = [{"role": "user", "content": "What is the weather?"}, {"role": "assistant", "content": "It is sunny"}]
PREFERRED = {"chosen": [CHAT[1]], "rejected": [{**CHAT[1], "content": "no idea"}]}
DPO = TrainSection(output_dir="run", steps=1, batch_size=1, method="dpo")


def _asked(*arguments: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    return [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}]


def test_rows_of_pairs_keep_their_own_keys_and_tools(jsonl: Write, chat_tokenizer: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": {}}}}]
    rows = [
        {"prompt": _asked({"city": "Rome"}), **PREFERRED, "tools": tools, "id": 1},
        {"prompt": _asked({"x": 1, "y": None}), **PREFERRED},
    ]
    corpus = read_rows(Source(files=[str(jsonl(*rows))]), load_tokenizer(chat_tokenizer), DPO)
    found: Any = [*corpus.training]  # type: ignore[call-overload]
    assert [each["prompt"] for each in found] == [row["prompt"] for row in rows]
    assert [each["tools"] for each in found] == [tools, None]
    assert "columns that are not read: id" in corpus.describe()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": [CHAT[0]], **PREFERRED, "images": ["a.png"]}, "'images' is not empty"),
        ({"prompt": [CHAT[0]], **PREFERRED, "chosen": [{**CHAT[1], "train": False}]}, "no turn is to be trained on"),
        ({"prompt": "a", "chosen": "b", "rejected": "c \ud83d"}, "half a character"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{"name": "f"}]}, "tools are rendered into chats"),
    ],
)
def test_rows_of_pairs_refuse_what_is_not_used(
    jsonl: Write, chat_tokenizer: str, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobFileError, match=says):
        read_rows(Source(files=[str(jsonl(row))]), load_tokenizer(chat_tokenizer), DPO)


THOUGHT = {**CHAT[1], "reasoning_content": "It is summer"}
KTO = DPO.model_copy(update={"method": "kto"})


@pytest.mark.parametrize(
    ("train", "row"),
    [
        (DPO, {"prompt": [CHAT[0]], **PREFERRED, "rejected": [THOUGHT]}),
        (KTO, {"prompt": [CHAT[0]], "completion": [THOUGHT], "label": True}),
    ],
    ids=["dpo", "kto"],
)
def test_what_a_template_leaves_out_of_an_answer_is_refused(
    jsonl: Write, chat_tokenizer: str, train: TrainSection, row: dict[str, Any]
) -> None:
    with pytest.raises(JobFileError, match=r"what the assistant thinks \(reasoning_content\) in turn 2"):
        read_rows(Source(files=[str(jsonl(row))]), load_tokenizer(chat_tokenizer), train)


def test_what_a_template_leaves_out_of_a_prompt_is_named(jsonl: Write, chat_tokenizer: str) -> None:
    row = {"prompt": [{**CHAT[0], "name": "Ada"}], **PREFERRED}
    corpus = read_rows(Source(files=[str(jsonl(row))]), load_tokenizer(chat_tokenizer), DPO)
    assert "not in the chat template's text: name of user (2 turns)" in corpus.describe()


def checked(path: Path, tokenizer: str, train: TrainSection, longest: int) -> Corpus:
    loaded = load_tokenizer(tokenizer)
    assert loaded.pretrained is not None
    return check_answers(
        read_rows(Source(files=[str(path)]), loaded, train), loaded.pretrained, train, longest, loaded.end_of
    )


FOXES = {"prompt": "What is it?", "chosen": " a fox", "rejected": " a fox and more"}


@pytest.mark.parametrize("method", ["dpo", "orpo", "reward"])
def test_pairs_that_teach_nothing_are_counted_or_refused(jsonl: Write, chat_tokenizer: str, method: str) -> None:
    train, same = DPO.model_copy(update={"method": method}), {**FOXES, "rejected": " a fox"}
    corpus = checked(jsonl(same, FOXES), chat_tokenizer, train, 99)
    assert corpus.notes == ("warning: 1 pairs teach nothing: chosen and rejected are the same in them",)
    with pytest.raises(JobFileError, match="the same in each pair, up to data.sequence_length 99, so there is nothing"):
        checked(jsonl(same), chat_tokenizer, train, 99)


def test_what_orpo_adds_to_a_chat_is_named_once(tmp_path: Path, jsonl: Write, chat_tokenizer: str) -> None:
    rows, orpo = jsonl(*[{"prompt": [CHAT[0]], **PREFERRED}] * 2), DPO.model_copy(update={"method": "orpo"})
    tokenizer = load_tokenizer(chat_tokenizer).pretrained
    assert tokenizer is not None
    tokenizer.bos_token = "<|endoftext|>"
    (note,) = checked(rows, saved(tokenizer, tmp_path / "begins"), orpo, 99).notes  # type: ignore[arg-type]
    assert "<|endoftext|> before each prompt and <|im_end|> behind the end of each answer" in note
    assert not checked(jsonl(FOXES), chat_tokenizer, orpo, 99).notes
    assert not checked(rows, chat_tokenizer, DPO, 99).notes


@pytest.mark.parametrize(
    ("labels", "said"),
    [((True, True), "all 2 completions are wanted"), ((False, False), "not wanted"), ((True, False), "")],
)
def test_completions_that_are_all_wanted_or_not_are_named(
    jsonl: Write, chat_tokenizer: str, labels: tuple[bool, bool], said: str
) -> None:
    rows = [{"prompt": "What is it?", "completion": " a fox", "label": label} for label in labels]
    notes = checked(jsonl(*rows), chat_tokenizer, KTO, 99).notes
    assert said in notes[0] if said else not notes


def test_answers_that_are_cut_off_are_counted(jsonl: Write, chat_tokenizer: str) -> None:
    tokenizer = load_tokenizer(chat_tokenizer).pretrained
    assert tokenizer is not None
    length = len(tokenizer(FOXES["prompt"] + FOXES["chosen"])["input_ids"])  # the end token lies behind it
    corpus = checked(jsonl(FOXES, {**FOXES, "rejected": " a"}), chat_tokenizer, DPO, length)
    assert f"warning: 3 answers go on behind data.sequence_length {length}, and are cut off there" in corpus.notes
    with pytest.raises(JobFileError, match="the same in each pair"):
        checked(jsonl(FOXES), chat_tokenizer, DPO, length)


def test_the_ends_of_wanted_answers_are_learned(jsonl: Write, chat_tokenizer: str) -> None:
    tokenizer: Any = load_tokenizer(chat_tokenizer).pretrained
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert checked(jsonl({"prompt": [CHAT[0]], **PREFERRED}), chat_tokenizer, DPO, 99).ends == {end: 1}
    verdicts = [{"prompt": [CHAT[0]], "completion": [CHAT[1]], "label": label} for label in (True, False)]
    assert checked(jsonl(*verdicts), chat_tokenizer, KTO, 99).ends == {end: 1}


def _trl_tokenizer(method: str, tokenizer: PretrainedTokenizer, **keys: str) -> Any:
    job = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"files": "x", "sequence_length": 8, **keys},
        "train": {"output_dir": "run", "steps": 1, "batch_size": 2, "method": method},
    }
    return trl_tokenizer(parse_job(job), tokenizer)


@pytest.mark.parametrize("is_fast", [True, False])
def test_methods_of_trl_have_the_same_tokens(tmp_path: Path, is_fast: bool) -> None:
    """Also of a tokenizer that puts its end behind a text; a classifier keeps that."""
    from tokenizers import processors
    from transformers import ByT5Tokenizer

    tokenizer: Any = byte_level() if is_fast else ByT5Tokenizer()
    end = tokenizer.eos_token_id
    if is_fast:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", end)]
        )
    loaded, before = PretrainedTokenizer(tokenizer, end), tokenizer.encode("a fox")
    ids = loaded.encode([Example("a fox")])[0].ids.tolist()
    for method in ("dpo", "kto", "reward", "classify"):
        own = _trl_tokenizer(method, loaded)
        assert own.encode("a fox") == (before if method == "classify" else ids[:-1])
        assert method == "classify" or own.encode("a fox" + own.eos_token) == ids
    written = PretrainedTokenizer(tokenizer, tokenizer.pad_token_id)
    assert _trl_tokenizer("dpo", written, end_of_document=tokenizer.pad_token).eos_token == tokenizer.pad_token
    assert tokenizer.encode("a fox") == before
