"""A model's processor: it renders chats with media, expands the media's tokens, and makes what the model takes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from veomni_core.errors import ConfigError, HostError
from veomni_trainer.data.documents import Span
from veomni_trainer.data.media.decoding import EXTRA
from veomni_trainer.data.media.sources import KINDS
from veomni_trainer.data.reading import BadMedia, Unreadable
from veomni_trainer.job.media_keys import PROCESSOR_FILES, PixelBudget
from veomni_transformers.plugin_models import processor_in

_PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
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
        taken: the kinds of media that the model takes.
    """

    taken: tuple[str, ...] = KINDS

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
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"the processor in {self._folder} can't be loaded: {first}") from error
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
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise BadMedia(f"refused by {type(self.loaded).__name__}: {_one_line(error)}") from error

    def tokens(
        self, text: str, media: Sequence[tuple[str, Any]], learned: tuple[Span, ...] | None
    ) -> tuple[Any, Any, Any]:
        """The ids of a rendered chat with its media's tokens expanded; which are learned; which stand for media.

        Tokens that stand for media are never learned.

        Raises:
            BadMedia: the processor refuses the media.
            HostError: this transformers doesn't say where expanded tokens are.
        """
        options = {"return_offsets_mapping": True, f"return_{_OFFSETS}": True} if media else {}
        found = self.inputs([text], [media], **(options or {"return_offsets_mapping": True}))
        ids, offsets = np.asarray(found["input_ids"][0]), np.asarray(found["offset_mapping"][0]).reshape(-1, 2)
        moves = found.get(_OFFSETS) or [[]]
        if media and not moves[0]:
            raise HostError(
                f"{type(self.loaded).__name__} of this transformers doesn't say where the tokens of media are, so "
                "nothing of a chat can be masked; install transformers 5.23 or later"
            )
        places = [tuple(each["new_span"]) for each in moves[0]]
        starts, ends = offsets[:, 0], offsets[:, 1]
        starts = np.where(starts == ends, starts - 1, starts)  # trimmed white space, as in data/tokens.py

        def within(spans: Sequence[Span]) -> Any:
            inside = np.zeros(len(ids), np.bool_)
            for start, end in spans:
                inside |= (starts < end) & (ends > start)
            return inside

        is_media = within(places)
        spans = [(0, int(ends.max(initial=0)))] if learned is None else [_moved(span, moves[0]) for span in learned]
        return ids, within(spans) & ~is_media, is_media


def _moved(span: Span, moves: Sequence[Any]) -> Span:
    """A span of a rendered chat, in the text with expanded places before it."""

    def moved(at: int) -> int:
        before = [each for each in moves if each["span"][1] <= at]
        return at + (before[-1]["new_span"][1] - before[-1]["span"][1] if before else 0)

    return moved(span[0]), moved(span[1])


def _with_budget(processor: Any, pixels: PixelBudget) -> Any:
    """The processor's image processor, with other sizes; that it keeps to them is tried on two images.

    Raises:
        ConfigError: it doesn't.
    """
    import PIL.Image

    before = getattr(processor, "image_processor", None)
    if before is None:
        raise ConfigError(f"data.image_pixels: {type(processor).__name__} takes no images; leave it out")
    written = {f"{name}_pixels": value for name, value in pixels.model_dump().items() if value is not None}
    why = f"its sizes are {dict(getattr(before, 'size', None) or {})}"
    try:
        made = type(before).from_dict(before.to_dict(), **written)
        sizes = []
        for side in (8, int((4 * (pixels.max or 4 * (pixels.min or 1))) ** 0.5) + 64):
            found = made(images=[PIL.Image.new("RGB", (side, side))], return_tensors="np")
            sizes.append(found["pixel_values"].size / 3 / getattr(made, "temporal_patch_size", 1))
        if sizes[0] >= (pixels.min or 0) and (pixels.max is None or sizes[1] <= pixels.max):
            return made
        why = f"it makes {sizes[0]:,.0f} to {sizes[1]:,.0f} pixels of an image"
    except (ValueError, TypeError, KeyError) as error:
        why = _one_line(error)
    raise ConfigError(f"data.image_pixels: {type(before).__name__} doesn't keep to {written}: {why}. Leave it out")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
