"""Which columns of a table are read, and one row of them as an example to learn from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from veomni_core.commands import shown
from veomni_trainer.data.chat import Chats
from veomni_trainer.data.documents import Example
from veomni_trainer.data.messages import check_characters
from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.tables import LIST, TEXT, TURNS, Row
from veomni_trainer.job.source_keys import Columns

_MESSAGES = ("messages", "conversations")
_COMPLETIONS = ("completion", "response", "output", "answer")

_NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")

ReadRow = Callable[[Row], Example | None]


def find_columns(columns: Mapping[str, str], may_have_more: bool) -> Columns:
    """The columns that hold what is learned, where they can be read in one way.

    Turns of a chat come before texts beside them, which mostly hold the same again.

    Args:
        columns: those of the table, with what each holds.
        may_have_more: whether ``columns`` are those of the first row, and others may have tools too.

    Raises:
        Unreadable: there are none, or they can be read in several ways.
    """
    tools = "tools" if may_have_more or "tools" in columns else None
    chats = [name for name, holds in columns.items() if holds == TURNS]
    ways = [Columns(messages=name, tools=tools) for name in chats or _of(columns, _MESSAGES, LIST)]
    if not chats and columns.get("prompt") == TEXT:
        ways += [Columns(prompt="prompt", completion=name) for name in _of(columns, _COMPLETIONS, TEXT)]
    if not chats and "text" in columns:
        ways += [Columns(text="text")]
    if not ways and [*columns.values()] == [TEXT]:
        ways = [Columns(text=name) for name in columns]
    if len(ways) == 1:
        return ways[0]
    listed = ", ".join(f"{name} ({holds})" for name, holds in columns.items())
    found = "can be read in several ways" if ways else "has no column with a usual name"
    raise Unreadable(
        f"{found}; its columns are {listed}. Write data.columns: {{text: NAME}}, {{messages: NAME}} or "
        "{prompt: NAME, completion: NAME}"
    )


def names_of(columns: Columns) -> list[str]:
    """The names of the columns that are read."""
    return [name for name in columns.model_dump().values() if name is not None]


def unread_that_matter(columns: Columns, there: Iterable[str]) -> list[str]:
    """The columns beside those that are read which say what a row is about, or what it is worth."""
    of_pairs = ("label", "input") if columns.prompt is not None else ()
    read = names_of(columns)
    return [name for name in (*_NOT_TEXT, *of_pairs) if name in there and name not in read]


def check_unread(row: Row, columns: Columns) -> None:
    """Raise BadLine if ``row`` means something else without a value beside the ``columns`` that are read."""
    for name in unread_that_matter(columns, row):
        value = row[name]
        if name in _NOT_TEXT and value:
            raise BadLine(f"column {name!r} is not empty, and only text is trained on")
        if name == "label" and isinstance(value, (bool, int)) and not value:
            raise BadLine("column 'label' says that the completion is not wanted, and all completions are learned")
        if name == "input" and value:
            raise BadLine("column 'input' belongs to the prompt and is not read; join it to the column of the prompt")


def check_columns(names: Collection[str], there: Mapping[str, str]) -> None:
    """Raise Unreadable if the table with the columns ``there`` lacks one of ``names``."""
    missing = [name for name in names if name not in there]
    if missing:
        raise Unreadable(f"has no column {' and no '.join(map(repr, missing))}; its columns are {', '.join(there)}")


def describe(columns: Columns, loss_on: str) -> str:
    """What is read of the rows, in words."""
    if columns.text is not None:
        return f"text in column {columns.text!r}"
    learned = "everything" if loss_on == "all" else "the assistant's turns" if columns.messages else "the completion"
    if columns.messages is not None:
        tools = f" and their tools in {columns.tools!r}" if columns.tools is not None else ""
        return f"chats in column {columns.messages!r}{tools}, loss on {learned}"
    return f"prompts in column {columns.prompt!r} with completions in {columns.completion!r}, loss on {learned}"


def row_reader(columns: Columns, loss_on: str, chats: Chats | None) -> ReadRow:
    """The function that makes an example of a row, or ``None`` of a row without text. It raises BadLine."""
    text, messages, tools = columns.text, columns.messages, columns.tools or ""
    if messages is not None:
        assert chats is not None
        return lambda row: chats.example(_value(row, messages), row.get(tools))
    if text is not None:
        return lambda row: Example(written) if (written := _text(row, text)) else None
    prompt, completion = columns.prompt, columns.completion
    assert prompt is not None and completion is not None  # the job names both or neither
    return lambda row: _pair(_text(row, prompt), _text(row, completion), loss_on)


def _pair(prompt: str, completion: str, loss_on: str) -> Example:
    """A prompt and what follows it. The end token is learned too, since the completion ends there."""
    if not completion:
        raise BadLine("an empty completion")
    text = prompt + completion
    return Example(text, None if loss_on == "all" else ((len(prompt), len(text)),))


def _of(columns: Mapping[str, str], names: tuple[str, ...], holds: str) -> list[str]:
    return [name for name in names if columns.get(name) == holds]


def _value(row: Row, name: str) -> object:
    if name not in row:
        raise BadLine(f"no column {name!r}; its columns are {', '.join(row) or 'none'}")
    return row[name]


def _text(row: Row, name: str) -> str:
    value = _value(row, name)
    if not isinstance(value, str):
        raise BadLine(f"column {name!r} must be text, got {shown(value)}")
    check_characters(value, f"column {name!r}")
    return value
