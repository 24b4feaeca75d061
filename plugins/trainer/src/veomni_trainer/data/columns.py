"""Finds the columns of a table that are read, where they can be read in one way, and says what they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from veomni_trainer.data.prompts import verdict_in
from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.tables import LIST, TEXT, TURNS, Row
from veomni_trainer.job.source_keys import Columns

_MESSAGES = ("messages", "conversations")
_PROMPTS = ("prompt", "instruction", "question")
_COMPLETIONS = ("completion", "response", "output", "answer")
_LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
_MEDIA = {"images": ("images", "image"), "videos": ("videos", "video"), "audios": ("audios", "audio")}
_NOT_TEXT = tuple(name for names in _MEDIA.values() for name in names)
_INPUTS, _SYSTEMS = ("input", "context"), ("system", "system_prompt")
_BESIDE_CHATS = ("label", "history", *_SYSTEMS)
_BESIDE_PROMPTS = (*_BESIDE_CHATS, *_INPUTS)


def find_columns(columns: Mapping[str, str], may_have_more: bool) -> Columns:
    """The columns of a document, where they can be read in one way.

    Turns of a chat come before texts beside them, which mostly hold the same again.

    Args:
        columns: those of the table, with what each holds.
        may_have_more: whether ``columns`` are those of the first row, and others may have more.

    Raises:
        Unreadable: there are none, or they can be read in several ways.
    """
    # Turns may be text, as JSON.
    columns = {name: TURNS if holds == TEXT and name in _MESSAGES else holds for name, holds in columns.items()}
    beside = _beside(columns, may_have_more)
    chats = [name for name, holds in columns.items() if holds == TURNS]
    prompts = [name for name in _PROMPTS if name in columns]
    answers = [name for name in _COMPLETIONS if name in columns]
    if not prompts and "input" in columns and answers == ["output"]:
        prompts, beside = ["input"], beside | {"input": None}
    pair = [Columns(prompt=one, completion=other, **beside) for one in prompts for other in answers]
    if chats and pair and {*chats} <= {*prompts, *answers}:
        ways = pair
    else:
        ways = [
            Columns(messages=name, tools=beside["tools"], system=beside["system"])
            for name in chats or _of(columns, _MESSAGES, LIST)
        ]
        if not chats:
            ways += [each for each in pair if {columns[str(each.prompt)], columns[str(each.completion)]} == {TEXT}]
    if not chats and "text" in columns and "instruction" not in {each.prompt for each in ways}:  # the row as one text
        ways += [Columns(text="text")]
    if not chats and columns.get("input_ids") == LIST:
        ways += [_tokens(columns)]
    if not ways and [*columns.values()] == [TEXT]:
        ways = [Columns(text=name) for name in columns]
    if len(ways) == 1:
        return ways[0]
    raise _not_one(
        columns, ways, "{text: NAME}, {messages: NAME}, {input_ids: NAME} or {prompt: NAME, completion: NAME}"
    )


def find_columns_of(wanted: tuple[str, ...], columns: Mapping[str, str], may_have_more: bool) -> Columns:
    """The columns of the rows of a method: a prompt, and ``wanted`` beside it, each under its own name.

    Without a column of prompts, what is wanted holds them too.

    Args:
        wanted: such as ``("prompt", "chosen", "rejected")``.
        columns: those of the table, with what each holds.
        may_have_more: whether ``columns`` are those of the first row, and others may have more.

    Raises:
        Unreadable: some are missing, or they can be read in several ways.
    """
    named = {name: name for name in wanted if name in columns}
    ways = ["prompt"] if "prompt" in columns else [name for name in (*_PROMPTS, *_MESSAGES) if name in columns]
    answers = [name for name in _COMPLETIONS if name in columns] if "completion" in wanted else []
    if len(ways) > 1 or (len(answers) > 1 and "completion" not in columns):
        raise _not_one(columns, ways, "{" + ", ".join(f"{name}: NAME" for name in wanted) + "}")
    named |= {"completion": answers[0]} if answers and "completion" not in named else {}
    named |= {"prompt": ways[0]} if ways else {}
    if "completion" in wanted and "completion" not in named and ways and ways[0] in _MESSAGES:
        named["messages"] = named.pop("prompt")  # the last turns of a chat
    implied = {"prompt"} if len(wanted) > 1 else set()
    implied |= {"completion"} if "messages" in named else set()
    check_columns([name for name in wanted if name not in named and name not in implied], columns)
    return Columns(**named, **_beside(columns, may_have_more))


def with_media(columns: Columns, there: Collection[str]) -> Columns:
    """The columns, with those of images, videos and audio that have a usual name ``there``, in a table or a row."""
    if columns.text is not None or columns.input_ids is not None:
        return columns
    found = {}
    for key, names in _MEDIA.items():
        here = [name for name in names if name in there]
        if here and getattr(columns, key) is None:
            found[key] = here[0]
    return columns.model_copy(update=found) if found else columns


def names_of(columns: Columns) -> list[str]:
    """The names of the columns that are read."""
    return [name for name in columns.model_dump().values() if name is not None]


def unread_that_matter(columns: Columns, there: Iterable[str]) -> list[str]:
    """The columns beside those that are read which say what a row is about, or what it is worth."""
    is_chat = columns.text is None and columns.input_ids is None
    beside = _BESIDE_PROMPTS if columns.prompt is not None else _BESIDE_CHATS if is_chat else ()
    read = names_of(columns)
    return [name for name in (*_NOT_TEXT, *beside) if name in there and name not in read]


def check_unread(row: Row, columns: Columns, no_media: str) -> None:
    """Raise BadLine if ``row`` means something else without a value beside the ``columns`` that are read.

    ``no_media`` says why images, video and audio are not read; empty where those of one column of a kind are.
    """
    no_media = no_media or "only chats have places for it, and for one column of a kind; name it in data.columns"
    for name in unread_that_matter(columns, row):
        value = row[name]
        if name in _NOT_TEXT and value:
            raise BadLine(f"column {name!r} is not empty, and {no_media}")
        if name == "label" and (columns.completion or columns.messages) and verdict_in(value) is False:
            raise BadLine(
                "column 'label' says that the completion is not wanted, and all completions are learned; "
                "train.method: kto learns from such rows"
            )
        if name in _BESIDE_PROMPTS and name != "label" and value:
            where, key = ("column of the prompt", "input (or system)") if columns.prompt else ("turns", "system")
            raise BadLine(
                f"column {name!r} belongs to the prompt and is not read; join it to the {where}, or name it as "
                f"data.columns.{key}"
            )


def check_columns(names: Collection[str], there: Mapping[str, str]) -> None:
    """Raise Unreadable if the table with the columns ``there`` lacks one of ``names``."""
    missing = [name for name in names if name not in there]
    if missing:
        listed = ", ".join(there) or "none"
        raise Unreadable(f"has no column {' and no '.join(map(repr, missing))}; its columns are {listed}")


def describe(columns: Columns, loss_on: str, form: str = "text", there: Collection[str] = ()) -> str:
    """What is read of the rows of documents, of which the first has the columns ``there``, in words."""
    if columns.text is not None:
        return f"text in column {columns.text!r}"
    if columns.input_ids is not None:
        mask = columns.labels or columns.loss_mask
        learned = f"those that are learned in {mask!r}" if mask and loss_on != "all" else "all of them learned"
        return f"tokens in column {columns.input_ids!r}, {learned}"
    learned = "everything" if loss_on == "all" else "the assistant's turns" if columns.messages else "the completion"
    media = {f"{kind}s": name for kind, name in columns.media.items()}
    extras = {"tools": columns.tools} if columns.messages is not None else {"inputs": columns.input}
    extras = {what: name for what, name in extras.items() if name in there}  # tools may come in later rows
    extras |= {"system prompts": columns.system, **media}
    beside = "".join(f" and their {what} in {name!r}" for what, name in extras.items() if name)
    if columns.messages is not None:
        return f"chats in column {columns.messages!r}{beside}, loss on {learned}"
    written = {"chat": ", as turns of a chat", "alpaca": ", under Alpaca's headings"}.get(form, "")
    return (
        f"prompts in column {columns.prompt!r}{beside} with completions in {columns.completion!r}{written}, loss on "
        f"{learned}"
    )


def _beside(columns: Mapping[str, str], may_have_more: bool) -> dict[str, str | None]:
    """The columns of what may go with a prompt. Tools may come in later rows."""
    ways = {"input": _INPUTS, "system": _SYSTEMS}
    found = {kind: next(iter(_of(columns, names, TEXT)), None) for kind, names in ways.items()}
    return {**found, "tools": "tools" if may_have_more or "tools" in columns else None}


def _tokens(columns: Mapping[str, str]) -> Columns:
    masks = [name for name in ("labels", *_LOSS_MASKS) if name in columns]
    if len(masks) > 1:
        raise _not_one(columns, masks, "{input_ids: NAME, labels: NAME} or {input_ids: NAME, loss_mask: NAME}")
    learned = {"labels" if name == "labels" else "loss_mask": name for name in masks}
    mask = "attention_mask" if "attention_mask" in columns else None
    return Columns(input_ids="input_ids", attention_mask=mask, **learned)


def _not_one(columns: Mapping[str, str], ways: Collection[object], wanted: str) -> Unreadable:
    listed = ", ".join(f"{name} ({holds})" for name, holds in columns.items())
    found = "can be read in several ways" if ways else "has no column with a usual name"
    return Unreadable(f"{found}; its columns are {listed}. Write data.columns: {wanted}")


def _of(columns: Mapping[str, str], names: tuple[str, ...], holds: str) -> list[str]:
    return [name for name in names if columns.get(name) == holds]
