"""Tokenizes a source once: the tokens stay in a folder, under a key of the files' contents and of the tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from veomni_core.errors import HostError
from veomni_trainer.data.token_store import DamagedStore, TokenStore, checksum, read_store

_FORMAT = 5  # of the stored files; with another number, older ones are not looked at

Write = Callable[[Path], None]


def default_folder() -> Path:
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


def uncached(write: Write) -> TokenStore:
    """What ``write`` puts into a temporary folder; the files are gone when the process ends."""
    with tempfile.TemporaryDirectory(prefix="veomni-tokens-") as name:
        with _naming_failed_writes(Path(name)):
            write(Path(name))
        return read_store(Path(name))  # a file that is mapped may be removed


class TokenCache:
    """A folder of token stores. Processes that need the same one at the same time write it once.

    Attributes:
        notes: what the user should hear of: stores that were damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.notes: list[str] = []

    def get(self, key: str, write: Write) -> TokenStore:
        """The store named ``key``; where there is none, or a damaged one, ``write`` fills a new folder.

        Raises:
            HostError: the folder can't be written, or doesn't keep what is written.
        """
        store = self._folder / key
        try:
            return read_store(store)
        except DamagedStore as error:
            if store.exists():
                self.notes.append(f"the token cache {store} was damaged ({error}), and is made again")
        try:
            with _naming_failed_writes(self._folder):
                return self._made(store, write)
        except DamagedStore as error:
            raise HostError(
                f"the token cache {store} was made again, and is damaged again ({error}): check its disk, or name "
                "another folder as data.cache"
            ) from error

    def _made(self, store: Path, write: Write) -> TokenStore:
        """The store, which another process may have made while this one waited for the lock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{store}.lock"):
            with suppress(DamagedStore):
                return read_store(store)
            for left_over in self._folder.glob(f".{store.name}.*"):  # of a process that was killed
                shutil.rmtree(left_over)
            folder = Path(tempfile.mkdtemp(prefix=f".{store.name}.", dir=self._folder))
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
