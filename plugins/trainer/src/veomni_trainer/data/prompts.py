"""Reads a row's prompt and what follows it, both as text, or both as turns of a chat; and what labels say of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from veomni_core.commands import shown
from veomni_trainer.data.messages import ASSISTANT, ONLY_TEXT, Message, check_characters, read_messages, words_of
from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.tables import ClassNumber, Row
from veomni_trainer.job.source_keys import Columns

Said = str | list[Message]
_VERDICTS = {"true": True, "false": False, "1": True, "0": False}  # as CSV holds them
_TURNS_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|from|content|value)['"]\s*:""")


class PromptReader:
    """The prompts of rows, and the answers to them.

    Args:
        columns: which columns hold them.
        form: how a prompt of text is written: ``text``, ``chat`` or ``alpaca``. Without it, rows with instructions,
            inputs or system prompts are chats, or have Alpaca's headings without a chat template; others stay as they
            are.
        has_template: whether the tokenizer can render chats.
        no_media: why turns may hold no images, video and audio; empty if they may.
        is_media: whether there are columns of these, so that prompts are chats.
    """

    def __init__(
        self, columns: Columns, form: str | None, has_template: bool, no_media: str = ONLY_TEXT, is_media: bool = False
    ) -> None:
        instructs = columns.prompt == "instruction" or bool(columns.input or columns.system) or is_media
        self.form = form or (("chat" if has_template else "alpaca") if instructs else "text")
        self._columns, self._has_template, self._no_media = columns, has_template, no_media

    def read(self, row: Row, names: tuple[str, ...]) -> tuple[Said, dict[str, Said]]:
        """The prompt of a row, and its answers under ``names``: all of them text, or all turns.

        Answers may begin with the prompt, as turns: then these are it.

        Raises:
            BadLine: a column is missing, or doesn't hold what it should.
            Unreadable: they are turns, and there is no chat template.
        """
        columns = self._columns
        if columns.messages is not None:
            return self._within(row, None, {"completion": self._messages(row, columns.messages)})
        answers = {name: self._said(row, getattr(columns, name) or name) for name in names}
        prompt = self.prompt(row) if columns.prompt is not None else None
        kinds = {type(each) for each in answers.values()}
        if len(kinds) > 1:
            raise BadLine(f"{', '.join(names)} must all be text, or all be chats")
        if list in kinds and any(each[0]["role"] != ASSISTANT for each in answers.values()):  # type: ignore[index]
            return self._within(row, prompt, answers)
        if prompt is None:
            if len(names) == 1 or kinds != {str}:
                raise BadLine("no prompt: there is no column of prompts, and no turn before the assistant's")
            self._refuse_system(row, "join it to the answers")
            return _shared(answers)
        if isinstance(prompt, list) or list in kinds:
            prompt = prompt if isinstance(prompt, list) else self._asked(row, prompt)
            return prompt, {name: _as_turns(each) for name, each in answers.items()}
        return prompt, answers

    def chat(self, row: Row) -> list[Message]:
        """The turns of a whole chat. Raises BadLine if they are none."""
        return self._with_system(row, self._messages(row, str(self._columns.messages)))

    def prompt(self, row: Row) -> Said:
        """The prompt alone, as text or as turns."""
        name = str(self._columns.prompt)
        said = self._said(row, name, learned=False)
        more = _optional(row, self._columns.input)
        if isinstance(said, list):
            if more:
                raise BadLine(f"column {self._columns.input!r} is not empty, and turns have no place for it")
            return self._with_system(row, said)
        if self.form == "alpaca":
            parts = {"Instruction": said, **({"Input": more} if more else {}), "Response": ""}
            said = "\n\n".join(f"### {heading}:\n{text}" for heading, text in parts.items())
        elif more:
            said = f"{said}\n\n{more}"
        if self.form == "chat":
            self.check_template(name)
            return self._asked(row, said)
        self._refuse_system(row, "write data.prompt_format: chat")
        return said

    def _refuse_system(self, row: Row, instead: str) -> None:
        if _optional(row, name := self._columns.system):
            raise BadLine(f"column {name!r} is not empty, and a prompt of text has no place for it; {instead}")

    def _within(self, row: Row, prompt: Said | None, answers: Mapping[str, Said]) -> tuple[Said, dict[str, Said]]:
        """Of answers that are whole chats: the turns that they share, and what is left of each."""
        if len(answers) == 1:
            ((name, turns),) = answers.items()
            last = max(number for number, each in enumerate(turns) if each["role"] == ASSISTANT)  # type: ignore[index]
            found, rest = self._with_system(row, turns[:last]), {name: turns[last:]}  # type: ignore[arg-type]
        else:
            found, rest = _shared(answers)  # type: ignore[assignment]
            found = self._with_system(row, found)
        contents = [words_of(each) for each in found]
        if isinstance(prompt, list) and prompt != found:
            raise BadLine("the turns of the prompt are not those with which the answers begin")
        if isinstance(prompt, str) and prompt.strip() not in (each.strip() for each in contents):
            raise BadLine("the prompt is none of the turns with which the answers begin")
        return found, rest

    def _said(self, row: Row, name: str, learned: bool = True) -> Said:
        value = value_of(row, name)
        if isinstance(value, str):
            check_characters(value, f"column {name!r}")
            if not value and learned:
                raise BadLine(f"column {name!r} is empty")
            if not _TURNS_AS_TEXT.match(value):
                return value
            return self._turns(value, name, learned)
        if isinstance(value, dict):  # one turn
            value = [value]
        if not isinstance(value, list):
            raise BadLine(f"column {name!r} must be text or a list of messages, got {shown(value)}")
        return self._turns(value, name, learned)

    def _messages(self, row: Row, name: str) -> list[Message]:
        return self._turns(value_of(row, name), name, learned=True)

    def _turns(self, value: Any, name: str, learned: bool) -> list[Message]:
        self.check_template(name)
        return read_messages(value, learned, self._no_media)

    def check_template(self, name: str) -> None:
        """Raise Unreadable if the turns in the column ``name`` can't be rendered."""
        if not self._has_template:
            raise Unreadable(
                f"holds chats (in column {name!r}), and the tokenizer has no chat template. Write data.chat_template, "
                "or a data.tokenizer that has one"
            )

    def _asked(self, row: Row, text: str) -> list[Message]:
        return self._with_system(row, [Message({"role": "user", "content": text})])

    def _with_system(self, row: Row, turns: list[Message]) -> list[Message]:
        """The turns behind the row's system prompt, unless that is empty. Raises BadLine if they begin with one."""
        text = _optional(row, self._columns.system)
        if text and turns and turns[0]["role"] in ("system", "developer"):
            raise BadLine("there is a system prompt in its own column, and another one among the turns")
        return [Message({"role": "system", "content": text}), *turns] if text else turns


def value_of(row: Row, name: str) -> Any:
    """The value in a column. Raises BadLine if the row has none."""
    if name not in row:
        raise BadLine(f"no column {name!r}; its columns are {', '.join(row) or 'none'}")
    return row[name]


def text_of(row: Row, name: str) -> str:
    """The text in a column. Raises BadLine if it holds something else."""
    value = value_of(row, name)
    if not isinstance(value, str):
        raise BadLine(f"column {name!r} must be text, got {shown(value)}")
    check_characters(value, f"column {name!r}")
    return value


def verdict_of(row: Row, name: str) -> bool:
    """Whether the row's completion is wanted. Raises BadLine if the column holds neither true nor false."""
    value = value_of(row, name)
    if (verdict := verdict_in(value)) is None:
        raise BadLine(f"column {name!r} must be true or false, got {shown(value)}")
    return verdict


def verdict_in(value: Any) -> bool | None:
    """What a label says of a completion: whether it is wanted; ``None`` if it says something else."""
    return _VERDICTS.get(str(value).lower()) if isinstance(value, (bool, int, str)) else None


def class_of(row: Row, name: str) -> str:
    """The row's label as text. Raises BadLine if it is neither text, nor an integer, nor true or false."""
    value = value_of(row, name)
    if isinstance(value, ClassNumber):
        if not value.name:
            raise BadLine(f"column {name!r} has {int(value)}, which is none of its classes")
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, str) and value.strip()):
        return str(value)
    raise BadLine(f"column {name!r} must be a label (text or an integer), got {shown(value)}")


def _optional(row: Row, name: str | None) -> str:
    """The text in a column that a row may lack."""
    return text_of(row, name) if name is not None and row.get(name) is not None else ""


def _as_turns(said: Said) -> list[Message]:
    return said if isinstance(said, list) else [Message({"role": ASSISTANT, "content": said})]


def _shared(answers: Mapping[str, Said]) -> tuple[Said, dict[str, Said]]:
    """The prompt with which a chosen and a rejected answer begin, as TRL finds it, and what is left of the two."""
    from trl.data_utils import extract_prompt

    found: Any = extract_prompt(dict(answers))
    prompt = found.pop("prompt")
    if not prompt:
        raise BadLine("no prompt: there is no column of prompts, and the chosen and the rejected begin otherwise")
    first, second = found.values()
    if not (first and second) or first == second:
        raise BadLine("the chosen and the rejected are the same, or one of them is where the other goes on")
    return prompt, found
