"""Tokenized documents in files that are mapped into memory, so that a corpus may be larger than memory.

They stay in the cache, under a key of the files' contents and of the tokenizer, so that a source is tokenized once.
The cache of ``datasets`` has no checksums, and its chunks are not one array of tokens, of which a sequence is any part.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from filelock import FileLock
from numpy.typing import NDArray

from veomni_core.errors import HostError
from veomni_trainer.data.documents import Document, Mask, Tokens
from veomni_trainer.data.media.index import CHATS, ChatWriter, StoredChats
from veomni_trainer.data.media.rows import MediaChat
from veomni_trainer.data.reading import Reading

_IDS, _ENDS, _LEARNED, _INDEX = "ids.bin", "ends.bin", "learned.bin", "index.json"
_FORMAT = 6  # of the stored files; with another number, older ones are not looked at
_BLOCK = 2**20  # so many tokens, or bytes, are written or hashed at once


Write = Callable[[Path], None]  # of a store to an empty folder


class DamagedStore(Exception):
    """A folder does not hold what was written to it."""


@dataclass(frozen=True)
class TokenStore:
    """The documents of one source, one after the other.

    Attributes:
        ids: ``[tokens]``, of ``uint16`` where the vocabulary allows it.
        ends: ``[documents]``: where in ``ids`` each document ends.
        learned: ``[tokens]``, which tokens the loss is computed for; ``None``: for all, and the documents are text.
        reading: what was read and left out.
        chats: ``[documents]``: the chats with media, each ``None`` where a document is none; ``None``: there are none.
    """

    ids: Tokens
    ends: NDArray[np.int64]
    learned: Mask | None
    reading: Reading = field(default_factory=Reading)
    chats: Sequence[MediaChat | None] | None = None

    @property
    def starts(self) -> NDArray[np.int64]:
        """``[documents]``: where in ``ids`` each document starts."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])


def store_in_memory(documents: Sequence[Document]) -> TokenStore:
    """The same of ``documents`` that are in memory, at least one."""
    learned = None
    if any(document.learned is not None for document in documents):
        masks = (np.ones(len(each.ids), np.bool_) if each.learned is None else each.learned for each in documents)
        learned = np.concatenate([*masks])
    ids = np.concatenate([document.ids for document in documents])
    ends = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
    chats = [document.chat for document in documents]
    return TokenStore(ids, ends, learned, chats=chats if any(chats) else None)


def write_store(folder: Path, documents: Iterator[Document], reading: Reading, vocabulary: int) -> None:
    """Write ``documents`` to the empty ``folder``. Memory grows by eight bytes for a document, and not by its tokens.

    ``reading`` is written after the last document, since reading fills it.
    """
    dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
    ends = array("q")
    tokens, masked = 0, False
    chats = ChatWriter(folder)
    with (folder / _IDS).open("wb") as ids, (folder / _LEARNED).open("wb") as learned:
        for document in documents:
            _write(ids, document.ids, dtype)
            if document.learned is not None and not masked:
                masked = True
                _write_ones(learned, tokens)
            if masked:
                mask = document.learned
                _write_ones(learned, len(document.ids)) if mask is None else _write(learned, mask, np.dtype(np.bool_))
            tokens += len(document.ids)
            ends.append(tokens)
            chats.add(document.chat)
    chats.close()
    (folder / _ENDS).write_bytes(ends.tobytes())
    if not masked:
        (folder / _LEARNED).unlink()
    index = {
        "dtype": dtype.name,
        "checksums": {path.name: checksum(path) for path in sorted([*folder.glob("*.bin"), *folder.glob(CHATS)])},
        "reading": vars(reading),
    }
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def read_store(folder: Path) -> TokenStore:
    """Map the documents in ``folder`` into memory, after reading every byte once to compare it with its checksum.

    Raises:
        DamagedStore: something is missing, or is not what was written.
    """
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        for name, expected in index["checksums"].items():
            if checksum(folder / name) != expected:
                raise DamagedStore(f"{name} was changed or cut off")
        learned = _mapped(folder / _LEARNED, np.dtype(np.bool_)) if _LEARNED in index["checksums"] else None
        chats = StoredChats(folder) if CHATS in index["checksums"] else None
        if chats is not None and (path := chats.changed()):
            raise DamagedStore(f"{path} is not what it was when it was read")
        reading = Reading(**index["reading"])
        reading.checksum = " ".join(index["checksums"].get(name, "") for name in (_IDS, _ENDS, _LEARNED)).strip()
        return TokenStore(
            _mapped(folder / _IDS, np.dtype(index["dtype"])),
            _mapped(folder / _ENDS, np.dtype(np.int64)),
            learned,
            reading,
            chats,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedStore(" ".join(str(error).split())) from error


def checksum(path: Path) -> str:
    """The xxh3 hash of a file's content: as fast as the file can be read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def default_cache() -> Path:
    """``$VEOMNI_CACHE/tokens``, or ``veomni/tokens`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("VEOMNI_CACHE") or f"{cache}/veomni") / "tokens"


def key_of(files: list[Path], **facts: Any) -> str:
    """A name for what comes out of ``files`` under ``facts``; both decide it, by content.

    Every file is read and hashed: neither sizes nor times are trusted. A file that can't be read is left to the reader.
    """
    state = xxhash.xxh3_128(json.dumps([_FORMAT, facts], sort_keys=True).encode())
    for path in files:
        try:
            content = checksum(path)
        except OSError as error:
            content = str(error.strerror)
        state.update(f"{path.name}\0{content}\0".encode())
    return state.hexdigest()


def cached(store: Path, write: Write, notes: list[str]) -> TokenStore:
    """The store in the cache; where there is none, or a damaged one, which ``notes`` say, ``write`` fills a new folder.

    Processes that need the same one at the same time write it once.

    Raises:
        HostError: the cache can't be written, or doesn't keep what is written.
    """
    try:
        return read_store(store)
    except DamagedStore as error:
        if store.exists():
            notes.append(f"note: the token cache {store} was damaged ({error}), and is made again")
    try:
        with _naming_failed_writes(store.parent):
            return _made(store, write)
    except DamagedStore as error:
        raise HostError(
            f"the token cache {store} was made again, and is damaged again ({error}): check its disk, or name another "
            "folder as data.cache"
        ) from error


def _made(store: Path, write: Write) -> TokenStore:
    """The store, which another process may have made while this one waited for the lock."""
    store.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{store}.lock"):
        with suppress(DamagedStore):
            return read_store(store)
        for left_over in store.parent.glob(f".{store.name}.*"):  # of a process that was killed
            shutil.rmtree(left_over)
        folder = Path(tempfile.mkdtemp(prefix=f".{store.name}.", dir=store.parent))
        try:
            write(folder)
            shutil.rmtree(store, ignore_errors=True)
            folder.rename(store)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return read_store(store)


@contextmanager
def _naming_failed_writes(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        at = error.filename or folder
        raise HostError(
            f"tokens can't be written to {folder}: {error.strerror} ({at}). Name another folder as data.cache (with "
            "data.cache: false they are written to the system's temporary folder)"
        ) from error


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The file as a read-only array; an empty file can't be mapped."""
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _write(stream: BinaryIO, values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Block by block, so that a document of a gigabyte isn't in memory in two types at once."""
    for start in range(0, len(values), _BLOCK):
        stream.write(values[start : start + _BLOCK].astype(dtype).tobytes())


def _write_ones(stream: BinaryIO, count: int) -> None:
    for start in range(0, count, _BLOCK):
        stream.write(b"\1" * min(_BLOCK, count - start))
