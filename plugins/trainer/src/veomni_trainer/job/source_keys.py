"""The keys that say how files become documents, for the whole section ``data`` and for each of ``data.sources``."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from veomni_trainer.job.section import Number, Section

# In which a processor of media is stored; the last is the chat template of those from before chat_template.jinja.
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    "chat_template.json",
)


def _named(files: str | list[str]) -> str | list[str]:
    """Refuse an empty name: as a path it would mean the working directory, with the job in it."""
    if "" in ([files] if isinstance(files, str) else files):
        raise ValueError("a file's name is empty; name a file, a folder or a glob")
    return files


def _relative(pattern: str) -> str:
    if not pattern or PurePath(pattern).is_absolute():
        raise ValueError(
            "must be a glob below the folders of files, such as **/*.txt; a glob of its own goes into files"
        )
    return pattern


Files = Annotated[str | list[str], AfterValidator(_named)]


class Placeholders(Section):
    """The words in a chat in whose place a file of the row's column comes; ``null``: such a word is text."""

    image: str | None = Field(default="<image>", min_length=1)
    """In whose place an image comes."""
    video: str | None = Field(default="<video>", min_length=1)
    """In whose place a video comes."""
    audio: str | None = Field(default="<audio>", min_length=1)
    """In whose place audio comes."""


class Columns(Section):
    """Which columns of a table hold what: ``text``, or ``messages``, or ``prompt`` and ``completion``, or tokens."""

    text: str | None = None
    """The column with a document's text."""
    messages: str | None = None
    """The column with a chat: a list of turns, each with ``role`` and ``content`` (or ``from`` and ``value``)."""
    tools: str | None = None
    """The column with the tools that a chat may call, as JSON schemas."""
    system: str | None = None
    """The column with the system prompt of a chat."""
    prompt: str | None = None
    """The column with what is given: text, or turns."""
    input: str | None = None
    """The column with more of the prompt, as in Alpaca's files."""
    completion: str | None = None
    """The column with what is learned: text, or turns."""
    chosen: str | None = None
    """The column with the answer that is preferred."""
    rejected: str | None = None
    """The column with the answer that is not."""
    label: str | None = None
    """The column that says whether a completion is wanted."""
    input_ids: str | None = None
    """The column with a document's tokens."""
    labels: str | None = None
    """The column with the same tokens, and -100 for those that are not learned."""
    loss_mask: str | None = None
    """The column that says which tokens are learned, by 1 and 0."""
    attention_mask: str | None = None
    """The column that says which tokens are none but padding, by 0."""
    images: str | None = None
    """The column with the images of a chat, one or a list: paths beside the file, bytes, or data URIs."""
    videos: str | None = None
    """The column with the videos of a chat."""
    audios: str | None = None
    """The column with the audio of a chat."""

    @property
    def media(self) -> dict[str, str]:
        """The columns of images, video and audio, by the kind that they hold."""
        found = {"image": self.images, "video": self.videos, "audio": self.audios}
        return {kind: name for kind, name in found.items() if name is not None}

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = [name for name in ("text", "messages", "prompt", "input_ids") if getattr(self, name) is not None]
        if len(kinds) > 1 or not (kinds or self.chosen or self.completion):
            named = f"names {' and '.join(kinds)}" if kinds else "names none"
            raise ValueError(f"{named}; name text, or messages, or prompt and completion, or input_ids")
        if (self.chosen is None) != (self.rejected is None):
            raise ValueError("chosen and rejected belong together; name both columns")
        chats = ("messages", "prompt", "completion", "chosen")
        needed = {
            "tools": chats,
            "system": chats,
            "input": ("prompt", "completion"),
            "labels": ("input_ids",),
            "loss_mask": ("input_ids",),
            "attention_mask": ("input_ids",),
            **dict.fromkeys(("images", "videos", "audios"), chats),
        }
        for name, ways in needed.items():
            if getattr(self, name) is not None and not any(getattr(self, way) is not None for way in ways):
                whose = "those of a chat" if name == "tools" else f"no column without {' or '.join(ways)}"
                raise ValueError(f"{name} are {whose}; name {ways[0]} too")
        if self.labels is not None and self.loss_mask is not None:
            raise ValueError("labels and loss_mask both say what is learned; name one of the two")
        return self


class ReadingKeys(Section):
    """How the files of a source are read."""

    placeholders: Placeholders = Placeholders()
    """The words in chats in whose place the files of a row's columns come."""
    media_errors: Literal["stop", "skip"] = "stop"
    """Whether a row with an image, a video or audio that can't be read ends the job, or is counted and left out."""
    media_urls: bool = False
    """Whether images, video and audio are fetched from http addresses that rows name."""
    pattern: Annotated[str, AfterValidator(_relative)] = "**/*"
    """Which files of a folder are read."""
    format: Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "dataset"] | None = None
    """What the files are; by default their suffix says it. ``dataset``: a folder of ``datasets``' ``save_to_disk``."""
    separator: str | None = Field(default=None, min_length=1, max_length=1)
    """The character between two values of a CSV file; by default a comma, and in a TSV file a tab."""
    split: str | None = None
    """The split of a data set that has several: a saved ``DatasetDict``, or one of the Hub."""
    subset: str | None = None
    """The subset (configuration) of a data set of the Hub."""
    revision: str | None = None
    """The branch, tag or commit of a data set of the Hub; by default ``main``."""
    columns: Columns | None = None
    """Which columns of a table are read; by default those with a usual name."""
    prompt_format: Literal["text", "chat", "alpaca"] | None = None
    """How a prompt of text is written: as it is, as the user's turn of a chat, or under Alpaca's headings.

    By default as it is; with an ``instruction``, an ``input`` or a ``system`` prompt as a chat, or under headings where
    there is no chat template.
    """
    loss_on: Literal["assistant", "all"] = "assistant"
    """Of chats and pairs: whether only the assistant's turns (the completion) are learned, or everything."""
    bad_lines: Literal["stop", "skip"] = "stop"
    """Whether a line or row that can't be read ends the job, or is counted and left out."""


class Source(ReadingKeys):
    """One of several sources: the keys that it leaves out are those of the section ``data``."""

    files: Files
    """Files, folders (searched by ``pattern``), globs, ids of data sets of the Hub, or ``python-stdlib``."""
    weight: Number = Field(default=1.0, gt=0.0)
    """How often sequences are drawn from this source, relative to the others."""
