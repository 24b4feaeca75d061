"""Keys of the section ``data``: where rows have images, video or audio, and what becomes of those that are broken."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from veomni_trainer.job.section import Section

# In which a processor of media is stored; the last is the chat template of those from before chat_template.jinja.
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    "chat_template.json",
)


class Placeholders(Section):
    """The words in a chat in whose place a file of the row's column comes; ``null``: such a word is text."""

    image: str | None = Field(default="<image>", min_length=1)
    """In whose place an image comes."""
    video: str | None = Field(default="<video>", min_length=1)
    """In whose place a video comes."""
    audio: str | None = Field(default="<audio>", min_length=1)
    """In whose place audio comes."""


class MediaKeys(Section):
    """How images, video and audio of a source are read."""

    placeholders: Placeholders = Placeholders()
    """The words in chats in whose place the files of a row's columns come."""
    media_errors: Literal["stop", "skip"] = "stop"
    """Whether a row with an image, a video or audio that can't be read ends the job, or is counted and left out."""
    media_urls: bool = False
    """Whether images, video and audio are fetched from http addresses that rows name."""


class PixelBudget(Section):
    """Between how many pixels an image has after the model's processor has resized it."""

    min: int | None = Field(default=None, ge=1)
    """At least so many; by default as many as the processor's own settings say."""
    max: int | None = Field(default=None, ge=1)
    """At most so many."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("names neither min nor max; write one of them, or leave image_pixels out")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self
