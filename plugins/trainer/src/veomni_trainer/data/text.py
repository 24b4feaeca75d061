"""Reads text: whole files, each of which is a document, and the lines of tables. All of it is UTF-8."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from veomni_trainer.data.files import COMPRESSED
from veomni_trainer.data.reading import BadLine, Unreadable

_BEGINNINGS = {
    b"PAR1": "parquet; write data.format: parquet",
    b"ARROW1": "arrow; write data.format: arrow",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\x1f\x8b": "gzip; name it .gz",
    b"\x28\xb5\x2f\xfd": "zstandard; name it .zst",
    b"%PDF": "PDF",
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_text(path: Path) -> str:
    """The text of a file; it may be compressed.

    Raises:
        Unreadable: it is empty, or no UTF-8 text. The part of the reason before a colon is the same for all such files.
    """
    try:
        with open_bytes(path) as stream:
            data = stream.read()
    except OSError as error:
        raise Unreadable(f"is unreadable: {error.strerror or error}") from None
    data = data.removeprefix(_BYTE_ORDER_MARK)
    if not data:
        raise Unreadable("is empty")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = begins_like(data) or f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise Unreadable(f"is not UTF-8 text: {what}") from None
    if "\0" in text:
        what = begins_like(data) or f"a zero byte at offset {data.index(0)}"
        raise Unreadable(f"is not UTF-8 text: {what}")
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str | BadLine]]:
    """Every line with its number, from 1; a byte order mark at the start is no part of the first.

    Raises:
        Unreadable: the file is damaged, or in another encoding.
    """
    number = 0
    try:
        with open_bytes(path) as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    if what := begins_like(line):
                        raise Unreadable(f"can't be read by lines: {what}")
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                yield number, _decoded(line)
    except OSError as error:  # also what the libraries raise for damaged compressed files
        raise Unreadable(f"can't be read after line {number}: {error.strerror or error}") from None


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, of the Hub too; a compressed file is decompressed while it is read."""
    with _opened(path) as plain:
        if (kind := COMPRESSED.get(path.suffix.lower())) is None:
            yield plain
            return
        import pyarrow

        with io.BufferedReader(pyarrow.input_stream(plain, compression=kind)) as decompressed:
            yield decompressed


def _opened(path: Path) -> IO[bytes]:
    if path.parts[0] != "hf:":
        return path.open("rb")
    from huggingface_hub import HfFileSystem

    return cast("IO[bytes]", HfFileSystem().open("/".join(path.parts[1:]), "rb"))


def begins_like(data: bytes) -> str | None:
    """What ``data`` begins like, and what to do then; ``None`` for what may be text."""
    looks = (what for beginning, what in _BEGINNINGS.items() if data.startswith(beginning))
    return next((f"it begins like {what}" for what in looks), None)


def _decoded(line: bytes) -> str | BadLine:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadLine(f"not UTF-8 text: byte 0x{line[error.start]:02x} at offset {error.start}")
