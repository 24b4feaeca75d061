"""Where an image, a video or audio of a row is: a file, bytes, a data URI, or an address that may be fetched."""

from __future__ import annotations

import base64
import binascii
import json
import os.path
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from urllib.request import urlopen

from veomni_core.commands import shown
from veomni_trainer.data.reading import BadMedia
from veomni_transformers.jobs.job_files import first_line

KINDS = ("image", "video", "audio")
_URLS = ("http://", "https://")
_SECONDS = 30  # in which an address must answer


@dataclass(frozen=True)
class Medium:
    """One image, video or audio, not decoded yet.

    Attributes:
        kind: ``image``, ``video`` or ``audio``.
        path: the file; empty where it came as bytes.
        data: the bytes; empty where it is a file.
    """

    kind: str
    path: str = ""
    data: bytes = b""

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.path or f"an {self.kind} of {len(self.data):,} bytes"

    def read(self) -> bytes:
        """The bytes of the file. Raises BadMedia if it can't be read."""
        if not self.path:
            return self.data
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise BadMedia(f"{self.kind} {self.path} can't be read: {error.strerror or error}") from None


def media_in(value: Any, kind: str, folder: Path, fetches: bool) -> list[Medium]:
    """What the value of a column holds: nothing, one medium, or a list of them.

    Raises:
        BadMedia: it holds something else, or an address where none may be fetched.
    """
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):  # as in a CSV file
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    return [medium_of(each, kind, folder, fetches) for each in (value if isinstance(value, list) else [value])]


def medium_of(value: Any, kind: str, folder: Path, fetches: bool) -> Medium:
    """The medium that ``value`` names: a path from ``folder``, bytes, ``{"path", "bytes"}``, a data URI, an address.

    Raises:
        BadMedia: it names none.
    """
    given = value
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path") or value.get("url")
        if isinstance(data, str):
            return _decoded(data, kind)
        value = data if data is not None else path
    if isinstance(value, bytes | bytearray | memoryview):
        if not value:
            raise BadMedia(f"the {kind} has no bytes")
        return Medium(kind, data=bytes(value))
    if not isinstance(value, str) or not value.strip():
        raise BadMedia(
            f"the {kind} must be a path, bytes, {{path, bytes}}, a data URI or an address; got {shown(given)}"
        )
    if value[:5].lower() == "data:":
        return _decoded(value.partition(",")[2], kind)
    if value.lower().startswith(_URLS):
        return _fetched(value, kind, fetches)
    name = value.removeprefix("file://")
    path = folder / name
    if name != value and not os.path.isfile(path):
        path = folder / unquote(name)
    if not os.path.isfile(path):  # of names that are too long, Path.is_file raises
        if len(value) > 255 and (decoded := _as_base64(value)):  # OpenAI's audio is base64 alone
            return Medium(kind, data=decoded)
        what = "is a folder" if os.path.isdir(path) else "is not there"
        name = shown(value) if len(value) > 255 else repr(value)
        raise BadMedia(f"{kind} {name} {what}; paths go from {folder}")
    if not path.stat().st_size:
        raise BadMedia(f"{kind} {value} is empty")
    return Medium(kind, str(path))


def _decoded(text: str, kind: str) -> Medium:
    data = _as_base64(text)
    if not data:
        raise BadMedia(f"the {kind} is no base64: {shown(text)}")
    return Medium(kind, data=data)


def _as_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _fetched(url: str, kind: str, fetches: bool) -> Medium:
    if not fetches:
        raise BadMedia(
            f"{kind} {shown(url)} is an address, and none is fetched unless the job says data.media_urls: true"
        )
    try:
        with urlopen(url, timeout=_SECONDS) as answer:  # an http address: medium_of has looked
            return Medium(kind, data=answer.read())
    except (OSError, ValueError) as error:
        raise BadMedia(f"{kind} {shown(url)} can't be fetched: {first_line(error)}") from None
