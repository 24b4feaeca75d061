"""Turns a document into token numbers: byte by byte, or by a ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from veomni_core.errors import JobFileError, did_you_mean

BYTES = "bytes"
_USUAL_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, which only looks like <|end_of_sentence|>
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)

Tokens = NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """Numbers for text. ``vocab_size`` is one more than the largest; ``end`` closes every document."""

    vocab_size: int
    end: int

    def encode(self, document: bytes) -> Tokens:
        """The token numbers of one UTF-8 document, without ``end``."""
        ...


class ByteTokenizer:
    """Every byte is its own number, and 256 ends a document."""

    vocab_size = 257
    end = 256

    def encode(self, document: bytes) -> Tokens:
        return np.frombuffer(document, np.uint8)


class FileTokenizer:
    """A ``tokenizer.json``, as the tokenizers library reads it."""

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            raise JobFileError(f"data.tokenizer: {path} is not a tokenizer.json: {error}") from None
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end = _end_of_document(vocabulary, path, end_of_document)

    def encode(self, document: bytes) -> Tokens:
        return np.asarray(self._backend.encode(document.decode("utf-8"), add_special_tokens=False).ids, np.uint32)


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """``bytes``, or the tokenizer in a file or a folder.

    Raises:
        JobFileError: no such file, not a tokenizer, or no token that ends a document.
    """
    if name == BYTES:
        if end_of_document is not None:
            raise JobFileError("data.end_of_document: the bytes tokenizer has its own; remove the key")
        return ByteTokenizer()
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        hint = did_you_mean(name, [BYTES]) if "/" not in name else ""
        raise JobFileError(
            f"data.tokenizer: there is no file {path}. Write bytes, or the path of a tokenizer.json. {hint}".rstrip()
        )
    return FileTokenizer(path, end_of_document)


def _end_of_document(vocabulary: dict[str, int], path: Path, wanted: str | None) -> int:
    if wanted is not None:
        if wanted not in vocabulary:
            raise JobFileError(
                f"data.end_of_document: {path} has no token {wanted!r}. {did_you_mean(wanted, _USUAL_ENDS)}"
            )
        return vocabulary[wanted]
    for token in _USUAL_ENDS:
        if token in vocabulary:
            return vocabulary[token]
    raise JobFileError(f"data.end_of_document: say which token of {path} ends a document; none of the usual is there")
