"""The forms in which people have data: each is detected where it can be read in one way, used whole, and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from small_tokenizers import CHATML, byte_level, saved

from veomni_core.errors import JobFileError
from veomni_trainer.data.corpus import read_corpus
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.rows import read_rows
from veomni_trainer.data.tokens import load_tokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.source_keys import Source
from veomni_trainer.job.train_section import TrainSection

Write = Callable[..., Path]
USER, BOT = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "the fox"}
OTHER, BRIEF = {"role": "assistant", "content": "the dog"}, {"role": "system", "content": "Be brief."}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
START, END = "<|im_start|>", "<|im_end|>\n"


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(byte_level(), tmp_path_factory.mktemp("chat"))


def turns(*said: dict[str, str]) -> str:
    """The turns as the template of the tests writes them."""
    return "".join(f"{START}{each['role']}\n{each['content']}{END}" for each in said)


def documents(path: Path, tokenizer: str, **keys: Any) -> tuple[list[tuple[str, str]], Reading]:
    """The text of each document, and what is learned of it."""
    loaded, reading = load_tokenizer(tokenizer), Reading()
    read = [*read_documents(Source(files=[str(path)], **keys), loaded, reading)]

    def text(ids: Any) -> str:
        return str(loaded.pretrained.decode(ids)) if loaded.pretrained else bytes(ids[ids < 256].astype("u1")).decode()

    return [
        (text(each.ids), text(each.ids if each.learned is None else each.ids[each.learned])) for each in read
    ], reading


SAID = turns({"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"})
HEADED = "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
CALL = {"name": "f", "arguments": {"x": 1}}
SHAREGPT = [
    {"from": "human", "value": "Who?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "7"},
    {"from": "gpt", "value": "the fox"},
]


@pytest.mark.parametrize(
    ("row", "keys", "text", "learned"),
    [
        (ALPACA, {}, SAID, f"3{END}"),
        (ALPACA, {"prompt_format": "alpaca"}, f"{HEADED}3<|im_end|>", "3<|im_end|>"),
        (ALPACA, {"prompt_format": "text"}, "Add.\n\n1 23<|im_end|>", "3<|im_end|>"),
        ({**ALPACA, "input": "", "system": "Be brief."}, {}, None, f"3{END}"),
        ({"instruction": "Add.", "context": "1 2", "response": "3"}, {}, SAID, f"3{END}"),
        (
            {"question": "Who?", "response": "the fox", "system_prompt": "Be brief."},
            {},
            turns(BRIEF, USER, BOT),
            f"the fox{END}",
        ),
        ({"input": "Who? ", "output": "me"}, {}, "Who? me<|im_end|>", "me<|im_end|>"),
        ({"question": "Who? ", "answer": "me"}, {}, "Who? me<|im_end|>", "me<|im_end|>"),
        ({"prompt": "Who?", "completion": "the fox"}, {"prompt_format": "chat"}, turns(USER, BOT), f"the fox{END}"),
        ({"prompt": [USER], "completion": [BOT]}, {}, turns(USER, BOT), f"the fox{END}"),
        ({"prompt": [USER, BOT, USER], "completion": [OTHER]}, {}, turns(USER, BOT, USER, OTHER), f"the dog{END}"),
        ({"prompt": "Who?", "response": [BOT]}, {}, turns(USER, BOT), f"the fox{END}"),
        ({"prompt": [USER], "completion": "the fox"}, {}, turns(USER, BOT), f"the fox{END}"),
        ({"conversations": [USER, BOT], "system": "Be brief."}, {}, turns(BRIEF, USER, BOT), f"the fox{END}"),
        ({"conversations": SHAREGPT}, {}, None, None),
        ({"messages": [USER, {**BOT, "weight": 0}, USER, OTHER]}, {}, None, f"the dog{END}"),
        (
            {"q": "Who?", "more": "x", "a": "me"},
            {"columns": {"prompt": "q", "input": "more", "completion": "a"}},
            None,
            None,
        ),
    ],
)
def test_a_form_is_detected_and_used_whole(
    jsonl: Write, with_template: str, row: dict[str, Any], keys: dict[str, Any], text: str | None, learned: str | None
) -> None:
    ((read, taught),), reading = documents(jsonl(row), with_template, **keys)
    assert read == text or text is None
    assert taught == learned or learned is None
    assert reading.sample and not reading.unused
    if "system" in row:
        assert read.startswith(turns(BRIEF))
    if row.get("conversations") is SHAREGPT:
        assert '"name": "f"' in taught and "7" not in taught
    if "q" in row:
        assert "Who?\n\nx" in read and taught.startswith("me")


def test_alpaca_has_headings_without_a_template_and_says_so(jsonl: Write) -> None:
    found, reading = documents(jsonl(ALPACA, {**ALPACA, "input": ""}), "bytes")
    assert found == [(f"{HEADED}3", "3"), ("### Instruction:\nAdd.\n\n### Response:\n3", "3")]
    assert reading.columns == (
        "prompts in column 'instruction' and their inputs in 'input' with completions in 'output', under Alpaca's "
        "headings, loss on the completion"
    )


def test_the_whole_row_as_text_is_left_out(jsonl: Write, with_template: str) -> None:
    found, reading = documents(jsonl({**ALPACA, "text": "Below is an instruction"}), with_template)
    assert found[0][0] == SAID and reading.unused == ["text"]


@pytest.mark.parametrize(
    ("row", "keys", "says"),
    [
        ({**ALPACA, "history": [["a", "b"]]}, {}, "'history' belongs to the prompt"),
        ({**ALPACA, "response": "4"}, {}, "several ways"),
        ({"prompt": "a", "instruction": "b", "completion": "c"}, {}, "several ways"),
        ({"text": "a", "input_ids": [1]}, {}, "several ways"),
        ({"input_ids": [1], "labels": [1], "loss_mask": [1]}, {}, "several ways"),
        ({"prompt": "a", "completion": "b", "system": "c"}, {"prompt_format": "text"}, "'system' is not empty"),
        ({"prompt": "a", "completion": "b", "context": "c", "input": "d"}, {}, "'context' belongs to the prompt"),
        (
            {"question": "a", "answer": "b", "system_prompt": "c"},
            {"columns": {"prompt": "question", "completion": "answer"}},
            "'system_prompt' belongs to the prompt",
        ),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, {}, "texts have no place for tools"),
        ({"messages": [BRIEF, USER, BOT], "system": "Be long."}, {}, "another one among the turns"),
        ({"messages": [{"from": "function_call", "value": "f("}, {"from": "gpt", "value": "x"}]}, {}, "are not JSON"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"columns": {"prompt": "prompt"}}, "names no completion"),
        ({"a": "b", "c": "d"}, {"columns": {"chosen": "a", "rejected": "c"}}, "of which one is preferred"),
        ({"m": [USER, BOT], "system": "x"}, {"columns": {"messages": "m"}}, "to the turns, or .* data.columns.system"),
        ({"messages": [USER, BOT], "history": ["x"]}, {}, "'history' belongs to the prompt"),
        ({"messages": [USER, BOT], "label": False}, {}, "the completion is not wanted"),
        ({"prompt": "a", "completion": "b", "label": "false"}, {}, "the completion is not wanted"),
        ({"prompt": [USER], "completion": [BOT], "input": "x"}, {}, "'input' is not empty, and turns have no place"),
        ({"text": "a", "half \ud83d": 1}, {}, "line 1: the name of a column holds half a character"),
        ({"messages": [{**USER, "half \ud83d": "x"}, BOT]}, {}, "line 1: a key of turn 1 holds half a character"),
    ],
)
def test_what_would_be_left_out_is_refused(
    jsonl: Write, with_template: str, row: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobFileError, match=says):
        documents(jsonl(row), with_template, **keys)


# Tokens


@pytest.mark.parametrize(
    ("row", "ids", "learned"),
    [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], None),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, [5, 6, 7], [False, True, True]),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0], "id": 3}, [5, 6, 7], [False, True, False]),
        ({"input_ids": [5, 6, 9], "labels": [-100, 6, -100], "attention_mask": [1, 1, 0]}, [5, 6], [False, True]),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tokens_are_taken_as_they_are(
    jsonl: Write, tmp_path: Path, row: dict[str, Any], ids: list[int], learned: list[bool] | None, kind: str
) -> None:
    path = jsonl(row)
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (document,) = read_documents(Source(files=str(path)), load_tokenizer("bytes"), Reading())
    assert document.ids.tolist() == ids
    assert (None if document.learned is None else document.learned.tolist()) == learned


def test_tokens_become_sequences_with_their_labels(jsonl: Write) -> None:
    rows = [{"input_ids": [1, 2, 3, number], "labels": [-100, -100, 3, number]} for number in range(9)]
    data = DataSection(files=str(jsonl(*rows)), sequence_length=8, cache=False)
    corpus = read_corpus(data, load_tokenizer("bytes"))
    found: Any = [*corpus.training]  # type: ignore[call-overload]
    assert [row["labels"].tolist() for row in found] == [row["labels"] for row in rows]
    assert "tokens in column 'input_ids', those that are learned in 'labels'" in corpus.describe()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_ids": [1, 500]}, "has 500, which is not between 0 and 256"),
        ({"input_ids": [1, -1]}, "has -1"),
        ({"input_ids": [1, 2.5]}, "must be a list of integers"),
        ({"input_ids": [1, 2], "labels": [2, 1]}, r"has 2 where the token is 1 \(at 0\); .* not shifted"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 1 values for 2 tokens"),
        ({"input_ids": [1, 2], "loss_mask": [1, 3]}, "has 3, which is not between 0 and 1"),
    ],
)
def test_tokens_that_can_not_be_are_bad_lines(jsonl: Write, row: dict[str, Any], says: str) -> None:
    with pytest.raises(JobFileError, match=f"line 1: .*{says}"):
        documents(jsonl(row), "bytes")


# Preferences and verdicts


def rows_of(path: Path, tokenizer: str, method: str, **keys: Any) -> Any:
    drawn = {"grpo": {"reward": "a:b"}} if method == "grpo" else {}
    train = TrainSection(output_dir="run", steps=1, batch_size=2, method=method, **drawn)  # type: ignore[arg-type]
    return [*read_rows(Source(files=[str(path)], **keys), load_tokenizer(tokenizer), train).training]  # type: ignore[call-overload]


PAIR = {"prompt": [USER], "chosen": [BOT], "rejected": [OTHER]}
KTO = {"prompt": [USER], "completion": [BOT], "label": False}


@pytest.mark.parametrize(
    ("method", "row", "read"),
    [
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, None),
        ("dpo", PAIR, None),
        ("dpo", {"chosen": [USER, BOT], "rejected": [USER, OTHER]}, PAIR),
        ("dpo", {"prompt": "Who?", "chosen": [USER, BOT], "rejected": [USER, OTHER], "messages": [USER, BOT]}, PAIR),
        ("dpo", {"prompt": "Who?", "chosen": [BOT], "rejected": [OTHER]}, PAIR),
        ("dpo", {"prompt": [USER], "chosen": "the fox", "rejected": "the dog"}, PAIR),
        ("dpo", {"chosen": "Who? me", "rejected": "Who? you"}, {"prompt": "Who?", "chosen": " me", "rejected": " you"}),
        (
            "dpo",
            {
                "conversations": [{"from": "human", "value": "Who?"}],
                "chosen": {"from": "gpt", "value": "the fox"},
                "rejected": {"from": "gpt", "value": "the dog"},
            },
            PAIR,
        ),
        (
            "dpo",
            {"instruction": "Who?", "input": "", "chosen": "the fox", "rejected": "the dog", "system": "Be brief."},
            {**PAIR, "prompt": [BRIEF, USER]},
        ),
        ("reward", {"chosen": [USER, BOT], "rejected": [USER, OTHER]}, PAIR),
        ("kto", {"prompt": "a", "completion": "b", "label": True}, None),
        ("kto", KTO, None),
        ("kto", {"messages": [USER, BOT], "label": False}, KTO),
        ("kto", {"completion": [USER, BOT], "label": False}, KTO),
        ("kto", {"instruction": "Who?", "output": "the fox", "label": 0}, KTO),
        ("grpo", {"question": "Who?", "answer": "me"}, {"question": "Who?", "answer": "me", "prompt": "Who?"}),
    ],
)
def test_rows_of_methods_in_every_form(
    jsonl: Write, with_template: str, method: str, row: dict[str, Any], read: dict[str, Any] | None
) -> None:
    assert rows_of(jsonl(row), with_template, method) == [read or row]


def test_columns_of_methods_may_be_written(jsonl: Write, with_template: str) -> None:
    path = jsonl({"q": "a", "good": "b", "bad": "c"})
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert rows_of(path, with_template, "dpo", columns=columns) == [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    path = jsonl({"q": "a", "a": "b", "label": False})
    (row,) = rows_of(path, with_template, "kto", columns={"prompt": "q", "completion": "a"})
    assert row == {"prompt": "a", "completion": "b", "label": False}
    path = jsonl({"prompts": "a", "answer": "b"})
    assert rows_of(path, with_template, "grpo", columns={"prompt": "prompts"}) == [{"prompt": "a", "answer": "b"}]


@pytest.mark.parametrize(
    ("method", "row", "says"),
    [
        ("dpo", {"chosen": [USER, BOT], "rejected": [USER, BOT]}, "the chosen and the rejected are the same"),
        ("dpo", {"chosen": [USER, BOT], "rejected": [BRIEF, USER, OTHER]}, "begin otherwise"),
        ("dpo", {"chosen": [BOT], "rejected": [OTHER]}, "no prompt"),
        ("dpo", {"prompt": "Why?", "chosen": [USER, BOT], "rejected": [USER, OTHER]}, "none of the turns with which"),
        ("dpo", {**PAIR, "chosen": "the fox"}, "must all be text, or all be chats"),
        ("dpo", {"question": "a", "instruction": "b", "chosen": "c", "rejected": "d"}, "several ways"),
        ("kto", {"prompt": "a", "completion": "b", "label": "maybe"}, "must be true or false"),
        ("kto", {"prompt": "a", "completion": "b"}, "has no column 'label'"),
        (
            "dpo",
            {"chosen": "Who? me", "rejected": "Who? you", "system": "x"},
            "join it to the answers",
        ),
        ("reward", {"chosen": [USER, BOT], "rejected": [USER, OTHER], "history": ["x"]}, "'history' belongs"),
        ("grpo", {"prompt": "a", "completions": "b"}, "'completions' would not reach the reward"),
        ("grpo", {"prompt": "a", "completion": "b"}, "'completion' would not reach the reward"),
        ("grpo", {"prompt": "a", "trainer_state": "b"}, "'trainer_state' would not reach the reward"),
        ("grpo", {"prompt": "a", "answer": ["\ud83d"]}, "line 1: the row holds half a character"),
        ("grpo", {"prompt": "a", "id": 10**22}, "an integer of more than 64 bits; write it as text"),
    ],
)
def test_rows_of_methods_that_can_not_be_read(
    jsonl: Write, with_template: str, method: str, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobFileError, match=says):
        rows_of(jsonl(row), with_template, method)


TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}
TURNS = "line 2: the row is a chat, and the first one .* is text"
ENDINGS = {"chosen": [USER, BOT], "rejected": [USER, OTHER]}


@pytest.mark.parametrize(
    ("method", "rows", "says"),
    [
        ("pretrain", [{"messages": [USER, BOT]}] * 2, "column 'system' belongs to the prompt"),
        ("pretrain", [{"messages": [USER, BOT], "system": None}] * 2, "column 'system' belongs to the prompt"),
        ("kto", [{"messages": [USER, BOT], "label": True}] * 2, "column 'system' belongs to the prompt"),
        ("orpo", [ENDINGS] * 2, "column 'system' belongs to the prompt"),
        ("dpo", [TEXTS, PAIR], TURNS),
        ("reward", [PAIR, TEXTS], r"line 2: the row is text, and the first one \(.*, line 1\) is a chat"),
        ("kto", [{"prompt": "a", "completion": "b", "label": True}, KTO], TURNS),
        ("grpo", [{"prompt": "a"}, {"prompt": [USER]}], TURNS),
    ],
)
def test_a_row_that_means_more_than_the_first_is_a_bad_line(
    jsonl: Write, with_template: str, method: str, rows: list[dict[str, Any]], says: str
) -> None:
    path = jsonl(rows[0], rows[1] | ({"system": "Be brief."} if "system" in says else {}))
    with pytest.raises(JobFileError, match=f"line 2: .*{says}" if "system" in says else says):
        documents(path, with_template) if method == "pretrain" else rows_of(path, with_template, method)


@pytest.mark.parametrize("method", ["dpo", "orpo", "kto"])
def test_a_template_that_renders_past_turns_otherwise_hides_the_answer(
    jsonl: Write, tmp_path: Path, method: str
) -> None:
    numbered = CHATML.replace("message.role +", "message.role ~ messages | length ~")
    tokenizer = saved(byte_level(numbered), tmp_path / "numbered")
    with pytest.raises(JobFileError, match="renders turn 2 otherwise .* can't be told which tokens are the answer's"):
        rows_of(jsonl(KTO if method == "kto" else PAIR), tokenizer, method)
    assert rows_of(jsonl(PAIR), tokenizer, "reward")[0]["chosen"] == [BOT]  # a score is that of the whole chat


def test_learned_masks_are_booleans_in_the_store(jsonl: Write) -> None:
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [True, False, True]}]
    (document,) = read_documents(Source(files=str(jsonl(*rows))), load_tokenizer("bytes"), Reading())
    assert document.learned is not None and document.learned.dtype == np.bool_
