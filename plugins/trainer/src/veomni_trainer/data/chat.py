"""Renders chats by the tokenizer's chat template, and finds which characters are the assistant's."""

from __future__ import annotations

import re
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from veomni_trainer.data.documents import Example, Span
from veomni_trainer.data.messages import ASSISTANT, Message, read_messages, read_tools
from veomni_trainer.data.reading import BadLine, Unreadable

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WHAT_TO_DO = (
    "Write {% generation %}...{% endgeneration %} around what the assistant says, in a template of your own "
    "(data.chat_template), or data.loss_on: all"
)

Tools = list[dict[str, Any]] | None


class Chats:
    """Chats as text, with the spans that are learned: the assistant's turns, or everything.

    A template with ``{% generation %}`` says itself what the assistant's words are. Of another one, a turn is what
    rendering adds to the turns before it and to the generation prompt, if the whole chat is rendered with just that.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: Literal["assistant", "all"]) -> None:
        self._tokenizer, self._loss_on = tokenizer, loss_on

    def example(self, chat: Any, tools: Any = None) -> Example:
        """One row's chat, rendered.

        Raises:
            BadLine: it is no chat, or the template refuses it.
            Unreadable: it can't be told which tokens are the assistant's.
        """
        messages, read = read_messages(chat), read_tools(tools)
        try:
            template = self._tokenizer.get_chat_template(tools=read)
        except ValueError as error:  # it has several, and none that is the default
            raise Unreadable(f"the tokenizer's chat template can't be chosen: {error}") from None
        if self._loss_on == "all":
            return Example(self._render(messages, read), ends=False)
        if _GENERATION.search(template):
            text, spans = self._marked(template, messages, read)
        else:
            text, spans = self._compared(messages, read)
        _check_said(messages, [text[start:end] for start, end in spans])
        return Example(text, tuple(spans), ends=False)

    def _marked(self, template: str, messages: list[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The rendered chat, and the spans of its generation blocks.

        ``apply_chat_template`` would give a mask of tokens, without the turns after one whose first character is a
        space that belongs to no token's offsets (transformers 5.23).
        """
        options: dict[str, Any] = {"tools": tools, **self._tokenizer.special_tokens_map}
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages], chat_template=template, return_assistant_tokens_mask=True, **options
            )
        except Exception as error:
            raise _refusal(error) from None
        (text,), (spans,) = rendered
        return text, spans

    def _compared(self, messages: list[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The rendered chat, and the span of each of the assistant's turns, from renderings of the turns up to it."""
        text = self._render(messages, tools)
        spans = []
        for number, message in enumerate(messages, start=1):
            if message["role"] != ASSISTANT:
                continue
            if number == 1:
                raise BadLine("the chat begins with the assistant, and its template renders nothing before that turn")
            before = self._render(messages[: number - 1], tools, add_generation_prompt=True)
            after = self._render(messages[:number], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise Unreadable(
                    f"the chat template renders turn {number} otherwise when it is asked for and when it is past, so "
                    f"it can't be told which tokens are the assistant's. {_WHAT_TO_DO}"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _render(self, messages: list[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:
            raise _refusal(error) from None
        return str(text)


def check_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What is wrong with the syntax of the tokenizer's chat template; ``None`` if it is sound."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception:  # it refuses this chat, and may take others
        return None
    return None


def _check_said(messages: list[Message], learned: list[str]) -> None:
    """Raise Unreadable unless what the assistant says is learned, whichever way it was found."""
    for number, message in enumerate(messages, start=1):
        words = message["content"].rpartition("</think>")[2].strip()  # templates leave earlier thoughts out
        if message["role"] == ASSISTANT and not any(words in each for each in learned):
            raise Unreadable(
                f"the chat template doesn't render, or doesn't mark, what the assistant says in turn {number}; correct "
                "the template, or write data.loss_on: all"
            )


def _refusal(error: Exception) -> Exception:
    """A template that can't be used at all, or a chat that the template refuses (with any error: it is a program)."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return Unreadable(f"the chat template is faulty in line {error.lineno}: {error.message}")
    return BadLine(f"refused by the chat template: {str(error) or type(error).__name__}")
