"""Renders chats by the tokenizer's chat template, and finds which characters are the assistant's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from veomni_trainer.data.documents import Example, Span
from veomni_trainer.data.messages import ASSISTANT, Message, check_characters, read_tools, words_of
from veomni_trainer.data.reading import BadLine, Unreadable

if TYPE_CHECKING:
    from veomni_trainer.data.media.processor import MediaProcessor

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WHAT_TO_DO = (
    "Write {% generation %}...{% endgeneration %} around what the assistant says, in a template of your own "
    "(data.chat_template), or data.loss_on: all"
)
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")

Tools = list[dict[str, Any]] | None


class Chats:
    """Chats as text, with the spans that are learned: the assistant's turns, or everything.

    A template with ``{% generation %}`` says itself what the assistant's words are. Of another one, a turn is what
    rendering adds to the turns before it and to the generation prompt, if the whole chat is rendered with just that.
    A turn that its row excludes from training is not learned.

    Args:
        tokenizer: whose template renders them; or a model's processor.
        loss_on: what is learned.
        left_out: is called with what the template leaves out of a turn that isn't learned.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | MediaProcessor,
        loss_on: Literal["assistant", "all"],
        left_out: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._tokenizer, self._loss_on, self._left_out = tokenizer, loss_on, left_out

    def example(self, messages: list[Message], tools: Any = None) -> Example:
        """One row's chat, rendered.

        Raises:
            BadLine: the tools are none, or the template refuses the chat.
            Unreadable: it can't be told which tokens are the assistant's.
        """
        read = read_tools(tools)
        try:
            template = self._tokenizer.get_chat_template(tools=read)
        except ValueError as error:  # it has several, and none that is the default
            raise Unreadable(f"the tokenizer's chat template can't be chosen: {error}") from None
        if self._loss_on == "all":
            if unlearned := [number for number, each in enumerate(messages, start=1) if each.excluded]:
                raise BadLine(f"turn {unlearned[0]} is not to be trained on, and data.loss_on: all learns every turn")
            text = self._render(messages, read)
            learned = [text]
        else:
            by_marks = _GENERATION.search(template)
            text, spans = self._marked(template, messages, read) if by_marks else self._compared(messages, read)
            spans = _without_excluded(messages, spans)
            learned = [text[start:end] for start, end in spans]
        check_characters(text, "the chat")
        _check_said(messages, learned)
        for what in _not_rendered(messages, read, text):
            self._left_out(what)
        return Example(text, None if self._loss_on == "all" else tuple(spans), ends=False)

    def check(self, prompt: list[Message], answer: list[Message], tools: Tools, is_learned: bool = True) -> None:
        """Check that the template renders ``answer``, and name what it leaves out of the turns before it.

        ``is_learned``: whether the answer's tokens are learned, and not a score of the whole chat.

        Raises:
            BadLine: the template refuses the chat.
            Unreadable: it leaves out something that the assistant says, calls or thinks, or it can't be told which
                tokens are the answer's.
        """
        for message in prompt:
            message.excluded = True
        messages = [*prompt, *answer]
        before = self._render(prompt, tools, add_generation_prompt=is_learned)
        text = self._render(messages, tools) if answer else before
        if is_learned and not text.startswith(before):
            raise _unlike(len(messages), "the answer's. Write data.chat_template: one that renders both alike")
        _check_said(messages, [text.removeprefix(before)])
        for what in _not_rendered(messages, tools, text):
            self._left_out(what)

    def _marked(self, template: str, messages: list[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The rendered chat, and the spans of its generation blocks.

        ``apply_chat_template`` would give a mask of tokens, without the turns after one whose first character is a
        space that belongs to no token's offsets (transformers 5.23).
        """
        options: dict[str, Any] = {"tools": tools, **self._tokenizer.special_tokens_map}
        conversation: Any = messages
        try:
            rendered: Any = render_jinja_template(
                conversations=[conversation], chat_template=template, return_assistant_tokens_mask=True, **options
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
                raise _unlike(number, f"the assistant's. {_WHAT_TO_DO}")
            spans.append((len(before), len(after)))
        return text, spans

    def _render(self, messages: list[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        conversation: Any = messages
        try:
            text: Any = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
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


def _without_excluded(messages: list[Message], spans: list[Span]) -> list[Span]:
    """The spans of the assistant's turns, without those that are not to be trained on."""
    turns = [message for message in messages if message["role"] == ASSISTANT]
    if not any(turn.excluded for turn in turns):
        return spans
    if len(spans) != len(turns):
        raise Unreadable("has turns that are not to be trained on, and its chat template doesn't mark each turn once")
    return [span for span, turn in zip(spans, turns, strict=True) if not turn.excluded]


def _check_said(messages: list[Message], learned: list[str]) -> None:
    """Raise Unreadable unless what the assistant says, calls and thinks is learned, whichever way it was found.

    Templates may leave out thoughts that come before the user's last turn.
    """
    last_asked = max((n for n, each in enumerate(messages, start=1) if each["role"] == "user"), default=0)
    for number, message in enumerate(messages, start=1):
        if message["role"] != ASSISTANT or message.excluded:
            continue
        said = {"says": [words_of(message).rpartition("</think>")[2]], "calls (tool_calls)": [*_called(message)]}
        if number > last_asked:
            said |= {f"thinks ({key})": [message[key]] for key in _THOUGHTS if isinstance(message.get(key), str)}
        for what, texts in said.items():
            if not all(any(_has(each, words) for each in learned) for words in texts):
                raise Unreadable(
                    f"the chat template doesn't render, or doesn't mark, what the assistant {what} in turn {number}; "
                    "correct the template, or write data.chat_template: one that does"
                )


def _not_rendered(messages: list[Message], tools: Tools, text: str) -> Iterator[str]:
    """What the text of a chat lacks of its turns and tools, beside what is learned."""
    for message in messages:
        content = message["content"]
        parts = [] if isinstance(content, str) else [("content", part.get("text")) for part in content]
        for key, value in [*message.items(), *parts]:
            if isinstance(value, str) and key != "role" and not _has(text, value.rpartition("</think>")[2]):
                yield key if message["role"] == ASSISTANT else f"{key} of {message['role']}"
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and not _has(text, str(function.get("name", ""))):
            yield "tools"


def _called(message: Message) -> Iterator[str]:
    """The names of the functions that a turn calls, and the texts among their arguments."""
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        yield str(function.get("name", ""))
        yield from _texts(function.get("arguments"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)


def _unlike(number: int, whose: str) -> Unreadable:
    return Unreadable(
        f"the chat template renders turn {number} otherwise when it is asked for and when it is past, so it can't be "
        f"told which tokens are {whose}"
    )


def _has(text: str, words: str) -> bool:
    """Whether ``text`` holds ``words`` as they are, or as JSON writes them."""
    words = words.strip()
    return words in text or any(json.dumps(words, ensure_ascii=each)[1:-1] in text for each in (True, False))


def _refusal(error: Exception) -> Exception:
    """A template that can't be used at all, or a chat that the template refuses (with any error: it is a program)."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return Unreadable(f"the chat template is faulty in line {error.lineno}: {error.message}")
    return BadLine(f"refused by the chat template: {str(error) or type(error).__name__}")
