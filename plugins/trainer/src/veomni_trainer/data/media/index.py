"""Rendered chats and their media beside stored tokens: a line of JSON for each document, and bytes that rows held."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veomni_trainer.data.media.rows import MediaChat
from veomni_trainer.data.media.sources import Medium

CHATS, BYTES = "chats.jsonl", "media.bin"


class ChatWriter:
    """Writes chats to a folder, one after the other; those before the first chat count as documents without one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._documents = folder, 0
        self._lines: Any = None
        self._bytes: Any = None

    def add(self, chat: MediaChat | None) -> None:
        """The next document's chat; ``None`` of a document without one."""
        if chat is not None and self._lines is None:
            self._lines = (self._folder / CHATS).open("w", encoding="utf-8")
            self._bytes = (self._folder / BYTES).open("wb")
            self._lines.write("null\n" * self._documents)
        self._documents += 1
        if self._lines is not None:
            self._lines.write(json.dumps(None if chat is None else self._plain(chat)) + "\n")

    def close(self) -> None:
        """Finish the files, if there are any."""
        for stream in (self._lines, self._bytes):
            if stream is not None:
                stream.close()

    def _plain(self, chat: MediaChat) -> dict[str, Any]:
        return {"text": chat.text, "origin": chat.origin, "last": chat.last, "media": [*map(self._medium, chat.media)]}

    def _medium(self, medium: Medium) -> dict[str, Any]:
        if medium.path:
            about = Path(medium.path).stat()
            return {"kind": medium.kind, "path": medium.path, "state": [about.st_size, about.st_mtime_ns]}
        start = self._bytes.tell()
        self._bytes.write(medium.data)
        return {"kind": medium.kind, "bytes": [start, start + len(medium.data)]}


class StoredChats(Sequence[MediaChat | None]):
    """The chats in a folder, read from mapped files when they are needed."""

    def __init__(self, folder: Path) -> None:
        self._text, self._bytes = _mapped(folder / CHATS), _mapped(folder / BYTES)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        found = self._plain(index)
        if found is None:
            return None
        media = tuple(
            Medium(each["kind"], each.get("path", ""), self._between(*each.get("bytes", (0, 0))))
            for each in found.pop("media")
        )
        return MediaChat(**found, media=media)

    def changed(self) -> str:
        """The path of a file that is not what it was when it was read; empty if there is none."""
        for index in range(len(self)):
            for each in (self._plain(index) or {}).get("media", ()):
                if path := each.get("path"):
                    try:
                        about = Path(path).stat()
                    except OSError:
                        return str(path)
                    if [about.st_size, about.st_mtime_ns] != each["state"]:
                        return str(path)
        return ""

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._text == ord("\n"))

    def _plain(self, index: int) -> Any:
        start = int(self._ends[index - 1]) + 1 if index else 0
        return json.loads(self._text[start : self._ends[index]].tobytes())

    def _between(self, start: int, end: int) -> bytes:
        return self._bytes[start:end].tobytes()


def _mapped(path: Path) -> NDArray[np.uint8]:
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
