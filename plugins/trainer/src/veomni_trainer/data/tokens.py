"""Turns a document into token ids: one id per byte, or by a ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from veomni_core.errors import JobFileError, did_you_mean
from veomni_trainer.data.documents import Tokens
from veomni_trainer.job.data_section import BYTES

_USUAL_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's: not ASCII, unlike <|end_of_sentence|>
    "</s>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)


class Tokenizer(Protocol):
    """Maps text to token ids. ``vocab_size`` is the largest id plus one; ``end`` is the id that ends a document."""

    vocab_size: int
    end: int

    def encode(self, document: bytes) -> Tokens:
        """The token ids of one UTF-8 document, without ``end``."""
        ...


class ByteTokenizer:
    """The id of a byte is its value; 256 ends a document."""

    vocab_size = 257
    end = 256

    def encode(self, document: bytes) -> Tokens:
        return np.frombuffer(document, np.uint8)


class FileTokenizer:
    """A ``tokenizer.json``, loaded by the tokenizers library."""

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for every error
            raise JobFileError(f"data.tokenizer: {path} is not a tokenizer.json: {error}") from None
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end = _end_of_document(vocabulary, path, end_of_document)

    def encode(self, document: bytes) -> Tokens:
        return np.asarray(self._backend.encode(document.decode("utf-8"), add_special_tokens=False).ids, np.uint32)


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer named ``bytes``, or the one in a file or folder.

    Raises:
        JobFileError: the file doesn't exist, isn't a tokenizer, or has no token that ends a document.
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
    raise JobFileError(
        f"data.end_of_document: name the token of {path} that ends a document; it has none of the usual ones"
    )
