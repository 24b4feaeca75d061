"""Chats: what the template makes of them, and which tokens are the assistant's, seen by decoding the learned ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CHATML, FORGETFUL, MARKED, STRICT, byte_level, sentence_piece
from transformers import PreTrainedTokenizerFast

from veomni_core.errors import JobFileError
from veomni_trainer.data.chat import Chats
from veomni_trainer.data.documents import Document
from veomni_trainer.data.messages import read_messages
from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.tokens import PretrainedTokenizer, load_tokenizer

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def _untrimmed(template: str) -> PreTrainedTokenizerFast:
    return byte_level(template, trim_offsets=False)


MADE = {
    (make, template): make(template)
    for make in (byte_level, _untrimmed, sentence_piece)
    for template in (CHATML, MARKED, FORGETFUL, STRICT)
}


def _turns(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def _document(tokenizer: PreTrainedTokenizerFast, chat: Any, tools: Any = None, loss_on: Any = ASSISTANT) -> Document:
    (document,) = PretrainedTokenizer(tokenizer, end=0).encode(
        [Chats(tokenizer, loss_on).example(read_messages(chat), tools)]
    )
    return document


def _learned(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    """The text of each run of learned tokens."""
    assert document.learned is not None
    runs = groupby(zip(document.ids.tolist(), document.learned.tolist(), strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for is_learned, run in runs if is_learned]


LONG = _turns(
    (SYSTEM, "Be brief."),
    (USER, "What is the weather?"),
    (ASSISTANT, " It is s\u00fcnny \U0001f600 today "),
    (USER, "the dog"),
    (ASSISTANT, "jumps"),
)


@pytest.mark.parametrize("make", [byte_level, _untrimmed, sentence_piece])
@pytest.mark.parametrize(("template", "after"), [(CHATML, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_every_turn_of_the_assistant_is_learned_and_nothing_else(
    make: Callable[[str], PreTrainedTokenizerFast], template: str, after: str
) -> None:
    tokenizer = MADE[make, template]
    document = _document(tokenizer, LONG)
    learned = _learned(tokenizer, document)
    if make is sentence_piece:
        learned[0] = " " + learned[0]  # its decoder drops the space at the start of a text
    assert learned == [f" It is s\u00fcnny \U0001f600 today {after}", f"jumps{after}"]
    expected: Any = tokenizer.apply_chat_template(LONG)
    assert document.ids.tolist() == expected["input_ids"]


CONTENT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda text: text.strip() and "<|" not in text and "</think>" not in text
)


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=3), template=st.sampled_from([CHATML, MARKED])
)
def test_whatever_is_said_is_learned_whole(contents: list[tuple[str, str]], template: str) -> None:
    tokenizer = MADE[byte_level, template]
    chat = _turns(*(turn for asked, said in contents for turn in ((USER, asked), (ASSISTANT, said))))
    after = "<|im_end|>\n" if template == CHATML else "<|im_end|>"
    assert _learned(tokenizer, _document(tokenizer, chat)) == [said + after for _, said in contents]


def test_the_loss_may_be_on_everything() -> None:
    assert _document(MADE[byte_level, CHATML], LONG, loss_on="all").learned is None
    assert _document(MADE[byte_level, FORGETFUL], LONG, loss_on="all").learned is None


def test_tools_and_calls_reach_the_template() -> None:
    tokenizer = MADE[byte_level, CHATML]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    chat = [
        {"role": USER, "content": "What is the weather?"},
        {"role": ASSISTANT, "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": ASSISTANT, "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "sunny."}]},
    ]
    for given_tools in (tools, '[{"type": "function", "function": {"name": "weather"}}]'):
        document = _document(tokenizer, chat, given_tools)
        assert tokenizer.decode(document.ids).startswith(
            '<|im_start|>system\n[{"type": "function", "function": {"name"'
        )
        assert _learned(tokenizer, document) == [
            '{"name": "weather", "arguments": {"city": "Bonn"}}<|im_end|>\n',
            "It is sunny.<|im_end|>\n",
        ]


def test_sharegpt_turns_are_the_same_chat() -> None:
    names = {SYSTEM: "system", USER: "human", ASSISTANT: "gpt"}
    chat = [{"from": names[turn["role"]], "value": turn["content"]} for turn in LONG]
    tokenizer = MADE[byte_level, CHATML]
    assert _document(tokenizer, chat).ids.tolist() == _document(tokenizer, LONG).ids.tolist()


def test_a_template_that_changes_past_turns_is_refused_where_it_does() -> None:
    tokenizer = MADE[byte_level, FORGETFUL]
    plain = _turns((USER, "a"), (ASSISTANT, "b"), (USER, "c"), (ASSISTANT, "<think>e</think>d"))
    assert _learned(tokenizer, _document(tokenizer, plain)) == ["b<|im_end|>\n", "<think>e</think>d<|im_end|>\n"]
    thoughtful = _turns((USER, "a"), (ASSISTANT, "<think>e</think>b"), (USER, "c"), (ASSISTANT, "d"))
    with pytest.raises(Unreadable, match=r"renders turn 2 otherwise .* \{% generation %\}\.\.\.\{% endgeneration %\}"):
        _document(tokenizer, thoughtful)


def test_a_template_that_leaves_a_turn_out_is_refused() -> None:
    template = MARKED.replace("message.content + '<|im_end|>' }}{% endgeneration %}", "'' }}{% endgeneration %}")
    with pytest.raises(Unreadable, match=r"doesn't mark, what the assistant says in turn 3; correct the template"):
        _document(byte_level(template), LONG)
    silent = CHATML.replace("message.content }}", "(message.content if message.role == 'user' else '') }}")
    with pytest.raises(Unreadable, match=r"doesn't render, .* what the assistant says in turn 3"):
        _document(byte_level(silent), LONG)


def test_a_tokenizer_with_several_templates_needs_a_default() -> None:
    tokenizer = byte_level(CHATML)
    tokenizer.chat_template = {"default": CHATML, "rag": STRICT}
    assert _document(tokenizer, LONG).ids.tolist() == _document(MADE[byte_level, CHATML], LONG).ids.tolist()
    tokenizer.chat_template = {"tool_use": CHATML, "rag": STRICT}
    with pytest.raises(Unreadable, match=r"can't be chosen: .*multiple chat templates"):
        _document(tokenizer, LONG)


def test_what_the_template_refuses_is_a_bad_line() -> None:
    with pytest.raises(BadLine, match="refused by the chat template: roles must alternate"):
        _document(MADE[byte_level, STRICT], LONG)
    with pytest.raises(BadLine, match="the chat begins with the assistant"):
        _document(MADE[byte_level, CHATML], LONG[2:])
    assert len(_learned(MADE[byte_level, MARKED], _document(MADE[byte_level, MARKED], LONG[2:]))) == 2


def test_the_template_of_a_file_replaces_the_tokenizer_s(tmp_path: Path) -> None:
    MADE[byte_level, CHATML].save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "mine.jinja").write_text(MARKED, encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"), chat_template=str(tmp_path / "mine.jinja"))
    assert tokenizer.chats is not None
    assert tokenizer.chats.chat_template == MARKED
    assert tokenizer.fingerprint != load_tokenizer(str(tmp_path / "tokenizer")).fingerprint
    (tmp_path / "mine.jinja").write_text("{% for %}", encoding="utf-8")
    with pytest.raises(JobFileError, match=r"data\.chat_template: .*mine\.jinja, line 1: "):
        load_tokenizer(str(tmp_path / "tokenizer"), chat_template=str(tmp_path / "mine.jinja"))
    with pytest.raises(JobFileError, match=r"data\.chat_template: .*none\.jinja can't be read as text"):
        load_tokenizer(str(tmp_path / "tokenizer"), chat_template=str(tmp_path / "none.jinja"))
