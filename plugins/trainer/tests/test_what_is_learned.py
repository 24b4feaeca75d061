"""What of a file is learned, and what is refused: nothing is guessed, dropped or learned without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import CHATML, MARKED, STRICT, byte_level, saved
from transformers import PreTrainedTokenizerBase

from veomni_core.errors import JobFileError
from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.source_keys import Source
from veomni_trainer.run.dry_run import dry_run

Write = Callable[..., Path]
CHAT = [{"role": "user", "content": "What is the weather?"}, {"role": "assistant", "content": "It is sunny"}]
PAIR = {"prompt": "What is it? ", "completion": "a fox"}


def read(path: Path, tokenizer: str, **keys: Any) -> tuple[list[str], list[str], Reading]:
    """The texts of the documents, what is learned of each, and what was read."""
    loaded, reading = load_tokenizer(tokenizer), Reading()
    documents = [*read_documents(Source(files=[str(path)], **keys), loaded, reading)]
    assert loaded.pretrained is not None
    pieces = [(each.ids, each.ids if each.learned is None else each.ids[each.learned]) for each in documents]
    texts, learned = ([loaded.pretrained.decode(part[which]) for part in pieces] for which in (0, 1))
    return texts, learned, reading


# Nothing to learn


@pytest.mark.parametrize("keys", [{}, {"packing": True}], ids=["single", "packed"])
def test_rows_of_which_nothing_is_left_to_learn_stop_the_job(jsonl: Write, keys: dict[str, Any]) -> None:
    long = jsonl(*[{"prompt": "a prompt that is too long for it ", "completion": "x"}] * 4)
    data = DataSection(files=str(long), sequence_length=16, cache=False, **keys)
    with pytest.raises(JobFileError, match=r"hold nothing that is learned, to train on.*0 of 8 learned tokens left"):
        read_corpus(data, load_tokenizer("bytes"))


def test_validation_without_anything_to_learn_stops_the_job(jsonl: Write) -> None:
    short, long = {"prompt": "", "completion": "xyz"}, {"prompt": "a prompt that is too long ", "completion": "x"}
    training, held_out = jsonl(short), jsonl(long, name="held_out.jsonl")
    data = DataSection(files=str(training), validation_files=str(held_out), sequence_length=16, cache=False)
    with pytest.raises(JobFileError, match="nothing that is learned, to validate on"):
        read_corpus(data, load_tokenizer("bytes"))


def test_a_stream_that_teaches_nothing_is_refused(jsonl: Write) -> None:
    long = jsonl({"prompt": "a prompt that is too long for it ", "completion": "x"})
    with pytest.raises(JobFileError, match="the first 64 sequences of the stream"):
        read_corpus(DataSection(files=str(long), sequence_length=16, streaming=True), load_tokenizer("bytes"))


@pytest.mark.parametrize("packing", [False, True])
def test_learned_labels_are_counted_as_the_loss_counts_them(jsonl: Write, packing: bool) -> None:
    rows = [{"prompt": "p" * (1 + 5 * n % 17), "completion": "c" * (1 + n)} for n in range(12)]
    data = DataSection(files=str(jsonl(*rows)), sequence_length=16, packing=packing, cache=False)
    corpus = read_corpus(data, load_tokenizer("bytes"))
    learned = sum(int(row["labels"][1:].ne(-100).sum()) for row in corpus.training)  # type: ignore[attr-defined]
    assert (corpus.read[0].learned, corpus.read[0].learned_validation) == (learned, 0)
    whole = sum(len(row["completion"]) + 1 for row in rows)
    assert corpus.read[0].learned_whole == whole


def test_a_warning_says_that_half_of_it_is_lost(jsonl: Write) -> None:
    rows = jsonl({"prompt": "", "completion": "x" * 31})
    corpus = read_corpus(DataSection(files=str(rows), sequence_length=16, cache=False), load_tokenizer("bytes"))
    assert "warning: data.files: 52% of the tokens that would be learned (16 of 31)" in corpus.describe()


def test_the_same_is_said_by_a_dry_run_and_rows_count_what_they_learn(
    job_data: dict[str, Any], jsonl: Write, train: Callable[..., bool], run: Path, write_job: Callable[..., Path]
) -> None:
    from veomni_trainer.job.load import load_job

    job_data["data"] = {"files": str(jsonl(*[PAIR] * 8)), "sequence_length": 12}
    for way in (lambda: train(job_data), lambda: dry_run(load_job(write_job(job_data)))):
        with pytest.raises(JobFileError, match="nothing that is learned"):
            way()
    assert not run.exists()
    train(job_data, "data.sequence_length=32", "train.steps=1")
    row = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["learned_tokens"] == 2 * len(b"a fox" + b"E")
    assert "learned tokens in a step" in (run / "report.html").read_text(encoding="utf-8")


# Which columns are read


def test_turns_win_over_texts_beside_them_and_the_rest_is_named(jsonl: Write, chat_tokenizer: str) -> None:
    path = jsonl({"id": "a-1", "dialog": CHAT, "text": "the same"})
    texts, learned, reading = read(path, chat_tokenizer)
    assert "a-1" not in texts[0] and learned == ["It is sunny<|im_end|>\n"]
    assert reading.details() == [
        "first row: '<|im_start|>user\\nWhat is the weather?<|im_end|>\\n<|im_start|>assistant\\n' -> "
        "'It is sunny<|im_end|>\\n'",
        "columns that are not read: id, text",
    ]


@pytest.mark.parametrize(
    ("name", "text", "keys", "says"),
    [
        ("a.jsonl", '{"id": "a", "score": 3}', {}, "no column with a usual name"),
        ("a.jsonl", '{"a": [{"role": "user"}], "b": [{"from": "gpt"}]}', {}, "several ways"),
        ("a.csv", "prompt;completion\nwho?;me\n", {}, "write data.separator: ';'"),
        ("a.csv", "sep=;\nprompt;completion\nwho?;me\n", {}, "write data.separator: ';'"),
        ("a.csv", "question|answer\nwhat|cat\n", {}, "write data.separator: '|'"),
        ("a.tsv", 'prompt\tcompletion\n"Hello\tone\nthird"\ttwo\n', {}, "line 2: not TSV: a value begins with"),
        ("a.txt", "a\n", {"separator": ";"}, "is text, and data.separator is for CSV"),
        ("a.jsonl", '{"prompt": "a", "completion": "b", "label": false}', {}, "'label' says that the completion"),
        ("a.jsonl", '{"text": "a", "images": ["x.png"]}', {}, "column 'images' is not empty"),
        (
            "a.jsonl",
            '{"instruction": "Add", "input": "1 2", "output": "3"}',
            {"columns": {"prompt": "instruction", "completion": "output"}},
            "column 'input' belongs to the prompt",
        ),
        ("a.jsonl", '{"text": "half \\ud83d"}', {}, "half a character"),
    ],
)
def test_what_could_be_meant_otherwise_is_refused(
    tmp_path: Path, chat_tokenizer: str, name: str, text: str, keys: dict[str, Any], says: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(JobFileError) as caught:
        read(tmp_path / name, chat_tokenizer, **keys)
    assert says in str(caught.value)


def test_a_separator_is_written_and_wanted_rows_of_kto_are_read(tmp_path: Path, chat_tokenizer: str) -> None:
    (tmp_path / "a.csv").write_text("sep=;\nprompt;completion;label\nwho? ;me;True\n", encoding="utf-8")
    assert read(tmp_path / "a.csv", chat_tokenizer, separator=";")[0] == ["who? me<|im_end|>"]


def test_byte_order_marks_and_hidden_copies_are_no_text(tmp_path: Path, chat_tokenizer: str, jsonl: Write) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffox")
    assert read(tmp_path / "a.txt", chat_tokenizer)[0] == ["fox<|im_end|>"]
    folder = tmp_path / "folder"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("folder/a.jsonl", "folder/.ipynb_checkpoints/a-checkpoint.jsonl"):
        jsonl({"text": "fox"}, name=name)
    texts, _, reading = read(folder, chat_tokenizer)
    assert texts == ["fox<|im_end|>"] and "1 hidden (a-checkpoint.jsonl)" in reading.describe()


# Turns


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["compared", "marked"])
@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}], ids=str)
def test_a_turn_that_is_not_to_be_trained_on_is_not_learned(
    tmp_path: Path, jsonl: Write, template: str, mark: dict[str, Any]
) -> None:
    tokenizer = saved(byte_level(template), tmp_path / "tokenizer")
    first, second = {**CHAT[1], "content": "the lazy dog", **mark}, {**CHAT[1], "train": True}
    _, learned, _ = read(jsonl({"messages": [CHAT[0], first, CHAT[0], second]}), tokenizer)
    assert learned[0].strip() == "It is sunny<|im_end|>"
    with pytest.raises(JobFileError, match="turn 2 is not to be trained on, and data.loss_on: all"):
        read(jsonl({"messages": [CHAT[0], first, CHAT[0], second]}), tokenizer, loss_on="all")
    with pytest.raises(JobFileError, match="no turn is to be trained on"):
        read(jsonl({"messages": [CHAT[0], first]}), tokenizer)


def test_half_a_character_is_a_bad_line_in_a_chat_too(jsonl: Write, chat_tokenizer: str) -> None:
    bad = [{**CHAT[0], "content": "hi \ud83d"}, CHAT[1]]
    path = jsonl({"messages": CHAT}, {"messages": bad})
    with pytest.raises(JobFileError, match="line 2: the chat holds half a character"):
        read(path, chat_tokenizer)
    assert len(read(path, chat_tokenizer, bad_lines="skip")[0]) == 1


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize(
    ("turn", "says"),
    [({"content": "", "tool_calls": [CALL]}, "calls"), ({"reasoning_content": "It is summer"}, "thinks")],
)
def test_what_a_template_leaves_out_of_a_learned_turn_is_refused(
    tmp_path: Path, jsonl: Write, turn: dict[str, Any], says: str
) -> None:
    tokenizer = saved(byte_level(MARKED), tmp_path / "tokenizer")
    with pytest.raises(JobFileError, match=f"what the assistant {says}.* in turn 2"):
        read(jsonl({"messages": [CHAT[0], CHAT[1] | turn]}), tokenizer)


def test_what_a_template_leaves_out_elsewhere_is_named(jsonl: Write, chat_tokenizer: str) -> None:
    asked = {**CHAT[0], "name": "Ada"}
    thought = {**CHAT[1], "reasoning_content": "It is summer"}
    reading = read(jsonl({"messages": [asked, thought, CHAT[0], CHAT[1]]}), chat_tokenizer)[2]
    assert reading.details()[-1] == (
        "not in the chat template's text: name of user (1 turns), reasoning_content (1 turns)"
    )


# Where documents begin and end


def _with_beginning(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    from tokenizers import processors

    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    template = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    tokenizer.backend_tokenizer.post_processor = template  # type: ignore[attr-defined]
    return tokenizer


def test_texts_begin_and_end_as_the_tokenizer_states(tmp_path: Path, jsonl: Write) -> None:
    tokenizer = byte_level()
    assert tokenizer.eos_token == "<|im_end|>" and "<|endoftext|>" in tokenizer.get_vocab()
    texts, learned, reading = read(jsonl(PAIR), saved(_with_beginning(tokenizer), tmp_path / "tokenizer"))
    assert (texts, learned) == (["<|im_start|>What is it? a fox<|im_end|>"], ["a fox<|im_end|>"])
    assert reading.ends == {str(tokenizer.eos_token_id): 1}


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (None, None)], ids=["ends", "just stops"])
def test_the_end_of_a_turn_is_what_its_template_writes(
    tmp_path: Path, jsonl: Write, template: str | None, end: str | None
) -> None:
    tokenizer = byte_level(template or STRICT)
    reading = read(jsonl({"messages": CHAT}), saved(tokenizer, tmp_path / "tokenizer"))[2]
    assert reading.ends == {str(-1 if end is None else tokenizer.convert_tokens_to_ids(end)): 1}
