"""Puts the media of a row's columns into its chat, where parts or placeholders stand for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from veomni_trainer.data.media.sources import KINDS, Medium, medium_of
from veomni_trainer.data.messages import ASSISTANT, Message
from veomni_trainer.data.reading import BadMedia
from veomni_trainer.job.source_keys import Placeholders


class Placing:
    """Where media go in chats.

    Args:
        placeholders: the words in whose place they come.
        fetches: whether addresses may be fetched.
    """

    def __init__(self, placeholders: Placeholders, fetches: bool) -> None:
        self._words = {word: kind for kind, word in placeholders.model_dump().items() if word is not None}
        self._split = re.compile(f"({'|'.join(map(re.escape, self._words))})") if self._words else None
        self._fetches = fetches

    def has_places(self, messages: Sequence[Message]) -> bool:
        """Whether turns have parts of media, or placeholders for them."""
        return any(
            isinstance(each["content"], list)
            or (each["role"] != ASSISTANT and any(word in each["content"] for word in self._words))
            for each in messages
        )

    def placed(
        self, messages: Sequence[Message], beside: Mapping[str, Sequence[Medium]], folder: Path
    ) -> tuple[list[Message], list[Medium]]:
        """The turns, each with a list of parts, and the media of all of them in the order of their parts.

        Media of a column without any place for them come before the text of the user's first turn, as TRL puts them.

        Args:
            messages: the turns, in which a part of media has a ``source`` or stands for the next of the column.
            beside: the media of the row's columns, by kind.
            folder: where paths go from.

        Raises:
            BadMedia: there are more places than media, or fewer.
        """
        turns = [self._parts(message) for message in messages]
        waiting = {kind: list(beside.get(kind, ())) for kind in KINDS}
        open_ = [part["type"] for parts in turns for part in parts if part["type"] in KINDS and "source" not in part]
        for kind in KINDS:
            places, there = open_.count(kind), len(waiting[kind])
            if there and not places:
                self._before_first(messages, turns, kind, there)
            elif places != there:
                raise BadMedia(self._mismatch(kind, places, there, kind in beside))
        media: list[Medium] = []
        placed = []
        for message, parts in zip(messages, turns, strict=True):
            content = []
            for part in parts:
                if (kind := part["type"]) in KINDS:
                    source = part.get("source")
                    found = waiting[kind].pop(0) if source is None else medium_of(source, kind, folder, self._fetches)
                    media.append(found)
                    part = {"type": kind}
                content.append(part)
            turn = Message({**message, "content": content})
            turn.excluded = message.excluded
            placed.append(turn)
        return placed, media

    def _parts(self, message: Message) -> list[dict[str, Any]]:
        """The parts of a turn; placeholders of the assistant's are words that it says."""
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if self._split is None or message["role"] == ASSISTANT:
            return [part for part in parts if part.get("text") != ""]
        found: list[dict[str, Any]] = []
        for part in parts:
            if part["type"] != "text":
                found.append(part)
                continue
            for piece in self._split.split(part["text"]):
                kind = self._words.get(piece)
                found += [{"type": kind}] if kind else [{"type": "text", "text": piece}] if piece else []
        return found

    def _before_first(
        self, messages: Sequence[Message], turns: list[list[dict[str, Any]]], kind: str, count: int
    ) -> None:
        for message, parts in zip(messages, turns, strict=True):
            if message["role"] == "user":
                parts[:0] = [{"type": kind}] * count
                return
        raise BadMedia(f"no turn of the user, in which the {count} {kind}s of the row could stand")

    def _mismatch(self, kind: str, places: int, there: int, has_column: bool) -> str:
        word = next((word for word, meant in self._words.items() if meant == kind), None)
        of = f"its column holds {there}" if has_column else f"there is no column of them (data.columns.{kind}s)"
        text = f". If {word} is text, write data.placeholders: {{{kind}: null}}" if word and not there else ""
        return f"the chat has {places} places for {kind}s, and {of}{text}"
