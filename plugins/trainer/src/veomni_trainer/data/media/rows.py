"""Rows with images, video or audio as documents: rendered, expanded and counted by the model's processor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veomni_trainer.data.chat import Chats
from veomni_trainer.data.documents import Document, Span
from veomni_trainer.data.media.decoding import thumbnail
from veomni_trainer.data.media.placing import Placing
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.data.media.sources import KINDS, Medium, media_in
from veomni_trainer.data.messages import Message
from veomni_trainer.data.reading import BadMedia, Reading
from veomni_trainer.job.source_keys import Columns, Source

_PICTURES = 4  # that a report shows


@dataclass(frozen=True)
class MediaChat:
    """A rendered chat with its media, as each batch gives it to the processor.

    Attributes:
        text: the chat; each medium has one place in it.
        media: the media, in the order of their places.
        origin: the file and the row that it was read from.
        last: how many tokens the chat has up to the last that stands for a medium.
    """

    text: str
    media: tuple[Medium, ...]
    origin: str
    last: int


class MediaRows:
    """Makes documents of chats whose rows have media.

    Args:
        source: the source that they are of.
        processor: the model's.
        reading: counts what was read.

    Attributes:
        placing: where media go in chats.
    """

    def __init__(self, source: Source, processor: MediaProcessor, reading: Reading) -> None:
        self._processor, self._reading = processor, reading
        self._chats = Chats(processor, source.loss_on, reading.not_rendered)
        self.placing, self._fetches = Placing(source.placeholders, source.media_urls), source.media_urls

    def document(
        self, row: Mapping[str, Any], columns: Columns, messages: Sequence[Message], path: Path, origin: str
    ) -> Document:
        """The document of a row's chat.

        Args:
            row: the row.
            columns: those of its media and tools.
            messages: the chat's turns.
            path: the row's file, from whose folder paths go.
            origin: the file and the row.

        Raises:
            BadLine: the chat can't be rendered.
            BadMedia: a medium can't be read, or there are more or fewer than places for them.
        """
        placed, media = self._placed(row, columns, messages, path)
        example = self._chats.example(placed, row.get(columns.tools or ""))
        ids, learned, last = self._expanded(example.text, example.learned, placed, media)
        return Document(ids.astype("uint32"), learned, MediaChat(example.text, tuple(media), origin, last))

    def prompt(
        self,
        row: Mapping[str, Any],
        columns: Columns,
        messages: Sequence[Message],
        path: Path,
        answers: Sequence[Sequence[Message]],
    ) -> tuple[list[Message], list[Medium]]:
        """The turns of a prompt, each with a list of parts, and its media; as :meth:`document`, with what it raises.

        That the chat template renders each of the ``answers`` behind it is checked.
        """
        placed, media = self._placed(row, columns, messages, path)
        for answer in answers or ((),):
            self._chats.check([*map(Message, placed)], self.placing.placed(answer, {}, path.parent)[0], None)
        text = self._processor.apply_chat_template(placed, tokenize=False, add_generation_prompt=True)
        self._expanded(text, None, placed, media)
        return placed, media

    def _placed(
        self, row: Mapping[str, Any], columns: Columns, messages: Sequence[Message], path: Path
    ) -> tuple[list[Message], list[Medium]]:
        folder = path.absolute().parent
        beside = {kind: media_in(row.get(name), kind, folder, self._fetches) for kind, name in columns.media.items()}
        placed, media = self.placing.placed(messages, beside, folder)
        if others := sorted({each.kind for each in media} - {*self._processor.kinds}):
            kinds = ", ".join(self._processor.kinds) or "none"
            raise BadMedia(f"there is {others[0]} in the row, and the model with its processor takes: {kinds}")
        return placed, media

    def _expanded(
        self, text: str, learned: tuple[Span, ...] | None, turns: Sequence[Message], media: Sequence[Medium]
    ) -> tuple[Any, Any, int]:
        """The ids of a rendered chat; which are learned; how many there are up to the last that stands for a medium."""
        self._check_places(text, media)
        for part in (part for turn in turns for part in turn["content"]):
            self._processor.check_words(part.get("text", ""))
        decoded = self._processor.decoded(media)
        ids, is_learned, stands_for = self._processor.tokens(text, decoded, learned)
        self._count(media, int(stands_for.sum()), decoded, turns)
        return ids, is_learned, int(stands_for.nonzero()[0][-1]) + 1 if stands_for.any() else 0

    def _check_places(self, text: str, media: Sequence[Medium]) -> None:
        there = Counter(each.kind for each in media)
        for kind in KINDS:
            token = self._processor.token_of(kind)
            if token is not None and text.count(token) != there[kind]:
                raise BadMedia(
                    f"the rendered chat has {text.count(token)} of {token!r} for {there[kind]} {kind}s: a turn's text "
                    f"holds it, or the chat template renders no {kind} in such a turn"
                )

    def _count(
        self, media: Sequence[Medium], tokens: int, decoded: Sequence[tuple[str, Any]], turns: Sequence[Message]
    ) -> None:
        reading = self._reading
        for each in media:
            reading.media[each.kind] += 1
        reading.media_tokens += tokens
        images = [each for kind, each in decoded if kind == "image"]
        if images and len(reading.pictures) < _PICTURES:
            words = " | ".join("".join(part.get("text", "") for part in turn["content"]).strip() for turn in turns)
            reading.pictures.append({"picture": thumbnail(images[0]), "text": words[:200]})
