"""A model's processor: it renders chats with media, expands the media's tokens, and makes what the model takes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from veomni_core.errors import ConfigError, HostError
from veomni_trainer.data.documents import Span, in_spans
from veomni_trainer.data.media.decoding import EXTRA, decode
from veomni_trainer.data.media.sources import KINDS, Medium
from veomni_trainer.data.reading import BadMedia, Unreadable
from veomni_trainer.job.data_section import PixelBudget
from veomni_trainer.job.source_keys import PROCESSOR_FILES
from veomni_transformers.jobs.job_files import first_line
from veomni_transformers.plugin_models import processor_in

_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
# How classes take the least and most pixels of an image: as arguments, as edges of their ``size`` that are areas (of
# the frames to which an image is repeated, or of one), or as a length in it.
_NAMED, _AREA_OF_FRAMES, _AREA, _LENGTH = _SPELLINGS = ("named", "area of frames", "area", "length")
_LONGEST = 16_384  # pixels of a longest edge that is a length
_PATCH = 32  # pixels, up to whose multiples a length is rounded
_OFFSETS = "text_replacement_offsets"


def has_processor(folder: Path) -> bool:
    """Whether a folder holds a processor of media."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


class MediaProcessor:
    """The processor in a folder, loaded when a row with media first needs it.

    Args:
        folder: where its files are.
        tokenizer: the job's, which takes the place of the processor's own.
        template: the chat template in place of the processor's own.
        pixels: the sizes that images are resized to.
        trust_remote_code: whether code that comes with it may run.

    Attributes:
        taken: the kinds of media that the model takes, each with the id of its token, if the model's config has one.
        gives_positions: whether the model gives media positions of their own, some only where they get a mask.
    """

    gives_positions = False
    taken: Mapping[str, int | None] = dict.fromkeys(KINDS)

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        pixels: PixelBudget | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._folder, self._tokenizer, self._template = folder, tokenizer, template
        self._pixels, self._trust = pixels, trust_remote_code

    @cached_property
    def loaded(self) -> Any:
        """transformers' processor.

        Raises:
            HostError: a library that it needs is not here.
            ConfigError: it can't be loaded, or takes no budget of pixels.
        """
        try:
            found = processor_in(self._folder, self._trust)
        except ImportError as error:
            what = next((line for line in str(error).splitlines() if line.strip()), "a library is missing")
            raise HostError(f"the processor in {self._folder} can't be loaded here: {what} {EXTRA}") from error
        except Exception as error:  # whatever a broken file leads to
            raise ConfigError(f"the processor in {self._folder} can't be loaded: {first_line(error)}") from error
        if not isinstance(found, ProcessorMixin):
            raise ConfigError(
                f"{self._folder} has files of a processor, but transformers loads a {type(found).__name__} from it; "
                "copy the model's processor_config.json there"
            )
        found.tokenizer = self._tokenizer
        if self._template is not None or not getattr(found, "chat_template", None):
            found.chat_template = self._template or self._tokenizer.chat_template
        if self._pixels is not None:
            found.image_processor = _with_budget(found, self._pixels)
        return found

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that both it and the model take."""
        return tuple(kind for kind in self.taken if getattr(self.loaded, _PARTS[kind], None) is not None)

    @property
    def sampling_rate(self) -> int | None:
        """Samples of audio per second."""
        return getattr(getattr(self.loaded, _PARTS["audio"], None), "sampling_rate", None)

    def decoded(self, media: Sequence[Medium]) -> list[tuple[str, Any]]:
        """The media with their kinds. Raises BadMedia if one can't be read."""
        return [(each.kind, decode(each, self.sampling_rate)) for each in media]

    def save(self, folder: Path) -> None:
        """Write it to ``folder``; as it was read, where nothing needed it loaded."""
        if self._pixels is not None or self._template is not None or "loaded" in self.__dict__:
            self.loaded.save_pretrained(folder)
            return
        for name in PROCESSOR_FILES:
            if (self._folder / name).is_file():
                shutil.copy2(self._folder / name, folder / name)

    @property
    def special_tokens_map(self) -> Any:
        """The tokenizer's, for templates."""
        return self._tokenizer.special_tokens_map

    def get_chat_template(self, *, tools: Any = None) -> str:
        """The template. Raises ValueError if it has several, and none that is the default."""
        template = self.loaded.chat_template
        if template is None:
            raise Unreadable("holds chats, and the processor has no chat template. Write data.chat_template")
        return str(template) if isinstance(template, str) else self.loaded._resolve_chat_template(None)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """As the processor's, which renders nothing for ``tools: None`` otherwise than a tokenizer does."""
        return self.loaded.apply_chat_template(conversation, **options)

    def token_of(self, kind: str) -> str | None:
        """What a rendered chat has in the place of a medium."""
        return getattr(self.loaded, f"{kind}_token", None)

    def check_words(self, text: str) -> None:
        """Raise BadMedia if the words of a row or file hold a token in whose place the model takes media."""
        for kind, word in self._tokens_of_media.items():
            if word in text:
                raise BadMedia(f"holds {word!r} in its text, in whose place the model takes {kind}s; take it out")

    @cached_property
    def _tokens_of_media(self) -> dict[str, str]:
        added = {token: word for word, token in self._tokenizer.get_added_vocab().items()}
        return {kind: added[token] for kind, token in self.taken.items() if token in added}

    def inputs(self, texts: Sequence[str], media: Sequence[Sequence[tuple[str, Any]]], **options: Any) -> Any:
        """What the model takes of rendered chats with their decoded media.

        Args:
            texts: the chats.
            media: by chat, kinds and what was decoded, in the order of their places.
            options: further arguments of the processor's.

        Raises:
            BadMedia: the processor refuses them.
        """
        given: dict[str, Any] = {}
        for kind, argument in _ARGUMENTS.items():
            rows = [[each for its, each in row if its == kind] for row in media]
            if not any(rows):
                continue
            if kind == "audio":
                rate = {"sampling_rate": self.sampling_rate} if self.sampling_rate else {}
                given |= {argument: [each for row in rows for each in row], **rate}
            elif kind == "video":
                given |= {argument: [[frames for frames, _ in row] for row in rows]}
                given["video_metadata"] = [[about for _, about in row] for row in rows]
            else:
                given[argument] = rows
        try:
            return self.loaded(text=list(texts), add_special_tokens=False, **given, **options)
        except Exception as error:  # processors raise what odd media lead to
            raise BadMedia(f"refused by {type(self.loaded).__name__}: {_one_line(error)}") from error

    def tokens(
        self, text: str, media: Sequence[tuple[str, Any]], learned: tuple[Span, ...] | None
    ) -> tuple[Any, Any, Any]:
        """The ids of a rendered chat with its media's tokens expanded; which are learned; which stand for media.

        Tokens that stand for media are never learned.

        Raises:
            BadMedia: the processor refuses the media, or makes nothing of one.
            ConfigError: it writes no token that the model takes them for, or text that the chat doesn't have.
            HostError: this transformers doesn't say where expanded tokens are.
        """
        options = {"return_offsets_mapping": True, f"return_{_OFFSETS}": True} if media else {}
        found = self.inputs([text], [media], **(options or {"return_offsets_mapping": True}))
        ids, offsets = np.asarray(found["input_ids"][0]), np.asarray(found["offset_mapping"][0]).reshape(-1, 2)
        moves = found.get(_OFFSETS) or [[]]
        # Mllama's tokens are not expanded: its layers look at images from outside.
        plain: Any = self._tokenizer(text, add_special_tokens=False) if media and not moves[0] else {}
        as_written = bool(plain) and ids.tolist() == plain["input_ids"]
        if media and not moves[0] and not as_written:
            raise HostError(
                f"{type(self.loaded).__name__} of this transformers doesn't say where the tokens of media are, so "
                "nothing of a chat can be masked; install transformers 5.23 or later"
            )
        places = [tuple(each["new_span"]) for each in moves[0]]
        if any(start == end for start, end in places):
            raise BadMedia(f"{type(self.loaded).__name__} makes no token of one of its media, which is too short")
        last = int(offsets[:, 1].max(initial=0))
        grown = moves[0][-1]["new_span"][1] - moves[0][-1]["span"][1] if moves[0] else 0
        if learned is not None and last > len(text) + grown:
            raise ConfigError(
                f"{type(self.loaded).__name__} writes text of its own into a chat, so it can't be told which tokens "
                "are learned. Write data.loss_on: all, or give the model a chat template that writes it"
            )
        stand_for = [token for token in {self.taken.get(kind) for kind, _ in media} if token is not None]
        is_media = np.isin(ids, stand_for) if as_written else in_spans(offsets, places)
        for kind in {kind for kind, _ in media} & {"image", "audio"}:  # frames of a video may come as images
            token = self.taken.get(kind)
            if token is not None and token not in ids[is_media]:
                raise ConfigError(
                    f"the processor in {self._folder} is not the model's: it writes no token {token} for an {kind}, "
                    f"which the model's config has as {kind}_token_id. Name the weights' own (data.tokenizer)"
                )
        spans = [(0, last)] if learned is None else [_moved(span, moves[0]) for span in learned]
        return ids, in_spans(offsets, spans) & ~is_media, is_media


def _moved(span: Span, moves: Sequence[Any]) -> Span:
    """A span of a rendered chat, in the text with expanded places before it."""

    def moved(at: int) -> int:
        before = [each for each in moves if each["span"][1] <= at]
        return at + (before[-1]["new_span"][1] - before[-1]["span"][1] if before else 0)

    return moved(span[0]), moved(span[1])


def _with_budget(processor: Any, pixels: PixelBudget) -> Any:
    """The processor's image processor, with other sizes; that it goes by them is tried on two images.

    Raises:
        ConfigError: it doesn't.
    """
    before = getattr(processor, "image_processor", None)
    if before is None:
        raise ConfigError(f"data.image_pixels: {type(processor).__name__} takes no images; leave it out")
    least, most, whys = pixels.min or 0, pixels.max, []
    for spelling in _SPELLINGS:
        try:
            made = _sized(before, spelling, pixels.min, most)
            found = _pixels(made, pixels)
            other = (min(least, most // 2) or None, most // 2) if most else (4 * least, None)
            follows = _pixels(_sized(before, spelling, *other), pixels) != found
        except Exception as error:  # of sizes that it has no use for
            whys.append(_one_line(error))
            continue
        if follows and all(least <= each <= (most or each) for each in found):
            return made
        whys.append(f"it makes {found[0]:,} to {found[1]:,} pixels of an image")
    written = ", ".join(f"{name}: {value}" for name, value in pixels.model_dump().items() if value is not None)
    raise ConfigError(f"data.image_pixels: {type(before).__name__} can't go by {{{written}}}: {whys[0]}. Leave it out")


def _sized(before: Any, spelling: str, least: int | None, most: int | None) -> Any:
    """The image processor with other limits, under one of the names that its class may have for them."""
    written = before.to_dict()
    if spelling == _NAMED:
        limits = {"min_pixels": least, "max_pixels": most}
    elif spelling == _LENGTH:
        limits = {"longest_edge": most and max(isqrt(most) - _PATCH, 1)}
    else:
        frames = before.temporal_patch_size if spelling == _AREA_OF_FRAMES else 1
        limits = {"shortest_edge": least and least * frames, "longest_edge": most and most * frames}
    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    if spelling != _NAMED:
        size = {name: value for name, value in dict(written["size"]).items() if value is not None}
        if (size["longest_edge"] <= _LONGEST) != (spelling == _LENGTH):
            raise ValueError(f"its size is {size}")
        given = {"size": size | given}
    return type(before).from_dict(written | given)


def _pixels(made: Any, pixels: PixelBudget) -> tuple[int, ...]:
    """How many pixels it makes of a small image, and of one with more than the most."""
    import PIL.Image

    sides = 32, int((2 * (pixels.max or 4 * (pixels.min or 1))) ** 0.5) + 64
    found = [made(images=[PIL.Image.new("RGB", (side, side))], return_tensors="pt")["pixel_values"] for side in sides]
    return tuple(each.numel() // 3 // getattr(made, "temporal_patch_size", 1) for each in found)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
