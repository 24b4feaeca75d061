"""Rendered chats and their media beside stored tokens: an Arrow file with a batch for each document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from veomni_trainer.data.media.rows import MediaChat
from veomni_trainer.data.media.sources import Medium

CHATS = "chats.arrow"
_STATE = {"size": pa.int64(), "changed": pa.int64()}  # of a medium's file when it was read
_MEDIUM = pa.struct({"kind": pa.string(), "path": pa.string(), "data": pa.large_binary(), **_STATE})
_SCHEMA = pa.schema({"text": pa.string(), "origin": pa.string(), "last": pa.int64(), "media": pa.list_(_MEDIUM)})


class ChatWriter:
    """Writes chats to a folder, one after the other; those before the first chat count as documents without one."""

    def __init__(self, folder: Path) -> None:
        self._path, self._documents = folder / CHATS, 0
        self._writer: Any = None

    def add(self, chat: MediaChat | None) -> None:
        """The next document's chat; ``None`` of a document without one."""
        if chat is not None and self._writer is None:
            self._writer = pa.ipc.new_file(str(self._path), _SCHEMA)
            for _ in range(self._documents):
                self._write({})
        self._documents += 1
        if self._writer is not None:
            self._write({} if chat is None else {**vars(chat), "media": [*map(_stored, chat.media)]})

    def close(self) -> None:
        """Finish the file, if there is one."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))


class StoredChats(Sequence[MediaChat | None]):
    """The chats in a folder, read from the mapped file when they are needed."""

    def __init__(self, folder: Path) -> None:
        self._batches = pa.ipc.open_file(pa.memory_map(str(folder / CHATS)))

    def __len__(self) -> int:
        return int(self._batches.num_record_batches)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        (found,) = self._batches.get_batch(index).to_pylist()
        if found["text"] is None:
            return None
        media = tuple(Medium(each["kind"], each["path"], each["data"]) for each in found.pop("media"))
        return MediaChat(**found, media=media)

    def changed(self) -> str:
        """The path of a file that is not what it was when it was read; empty if there is none."""
        for index in range(len(self)):
            media = self._batches.get_batch(index).column("media").flatten()
            for path, *state in zip(*(media.field(name).to_pylist() for name in ("path", *_STATE)), strict=True):
                if path and state != _state_of(path):
                    return str(path)
        return ""


def _stored(medium: Medium) -> dict[str, Any]:
    return {**vars(medium), **dict(zip(_STATE, _state_of(medium.path) if medium.path else (), strict=False))}


def _state_of(path: str) -> list[int]:
    try:
        about = Path(path).stat()
    except OSError:
        return []
    return [about.st_size, about.st_mtime_ns]
