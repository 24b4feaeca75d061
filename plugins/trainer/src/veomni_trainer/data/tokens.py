"""Turns examples into token ids: one id per byte, or by any tokenizer that transformers loads."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from veomni_core.errors import ConfigError, JobFileError, did_you_mean
from veomni_trainer.data.chat import check_template
from veomni_trainer.data.documents import Document, Example, Mask, Tokens, in_spans
from veomni_trainer.data.media.processor import MediaProcessor, has_processor
from veomni_trainer.data.messages import ONLY_TEXT
from veomni_trainer.job.data_section import BYTES, PixelBudget
from veomni_trainer.job.source_keys import PROCESSOR_FILES
from veomni_transformers.jobs.hub_snapshots import is_hub_id, nearest, snapshot
from veomni_transformers.jobs.job_files import first_line
from veomni_transformers.plugin_models import tokenizer_in

_DEEPSEEKS = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # not ASCII, unlike <|end_of_sentence|>
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", _DEEPSEEKS, "</s>", "<eos>", "[EOS]", "[SEP]")
_AFTER_END = 3  # so many tokens of white space may follow the end of a turn
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_FILES = (_FILE, _CONFIG, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class ByteTokenizer:
    """The id of a byte is its value; 256 ends a document. It has no files.

    Attributes:
        vocab_size: the largest id plus one.
        end: the id that ends a document.
        chats: what renders chats; ``None`` without a chat template.
        has_offsets: whether it says which characters a token stands for, so that parts of a text can be learned.
        pretrained: it as transformers' tokenizer; ``None`` if it is none.
        processor: the model's processor of images, video and audio; ``None`` if there is none.
        no_media: why rows may have none of these; empty if they may.
        fingerprint: a hash of all that decides which ids a text gets, its chat template included.
    """

    vocab_size = 257
    end = 256
    chats: PreTrainedTokenizerBase | None = None
    has_offsets = True
    pretrained: PreTrainedTokenizerBase | None = None
    processor: MediaProcessor | None = None
    no_media = ONLY_TEXT
    fingerprint = BYTES

    def encode(self, examples: Sequence[Example]) -> list[Document]:
        """The documents of ``examples``, in their order."""
        return [self._encode(example) for example in examples]

    def end_of(self, document: Document) -> int | None:
        """The token of its own that ``document`` is learned to end with; ``None`` if it just stops."""
        return _end_in(document, {self.end})

    def save(self, folder: Path) -> None:
        """Write nothing."""

    def _encode(self, example: Example) -> Document:
        ids = np.frombuffer(example.text.encode("utf-8"), np.uint8)
        learned = None
        if example.learned is not None:
            learned = np.zeros(len(ids), np.bool_)
            for span in example.learned:
                start, end = (len(example.text[:at].encode("utf-8")) for at in span)
                learned[start:end] = True
        return _document(ids.astype(np.uint16), learned, self.end if example.ends else None)


class PretrainedTokenizer:
    """The same of a tokenizer of transformers. A text begins with the tokens that it puts there, as in generation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end: int, processor: MediaProcessor | None = None) -> None:
        self._tokenizer, self.end, self.processor = tokenizer, end, processor
        self.no_media = "" if processor else ONLY_TEXT
        self.pretrained: PreTrainedTokenizerBase | None = tokenizer
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.has_offsets = tokenizer.is_fast
        self.chats = tokenizer if tokenizer.chat_template else None
        self._dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        self._beginning = np.asarray(added_tokens(tokenizer)[0], self._dtype)
        self._special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), end}

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(str(self.end).encode())
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()

    def encode(self, examples: Sequence[Example]) -> list[Document]:
        if not examples:
            return []
        masked = any(example.learned is not None for example in examples)
        encoded: Any = self._tokenizer(
            [example.text for example in examples],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=masked,
            verbose=False,
        )
        documents = []
        for number, example in enumerate(examples):
            ids: Tokens = np.asarray(encoded["input_ids"][number], self._dtype)
            learned = None
            if example.learned is not None:
                learned = in_spans(np.asarray(encoded["offset_mapping"][number]).reshape(-1, 2), example.learned)
            if example.ends and len(self._beginning):
                ids = np.append(self._beginning, ids)
                learned = None if learned is None else np.append(np.zeros(len(self._beginning), np.bool_), learned)
            documents.append(_document(ids, learned, self.end if example.ends else None))
        return documents

    def end_of(self, document: Document) -> int | None:
        return _end_in(document, self._special)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)
        if self.processor is not None:  # whose chat template is not always the tokenizer's
            self.processor.save(folder)


Tokenizer = ByteTokenizer | PretrainedTokenizer


def load_tokenizer(
    name: str,
    end_of_document: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    pixels: PixelBudget | None = None,
) -> Tokenizer:
    """The tokenizer named ``bytes``, or the one in a folder or file, or of a Hub id.

    Args:
        name: ``bytes``, a folder that ``AutoTokenizer`` loads, a ``tokenizer.json``, or a Hub id.
        end_of_document: the token that ends a document; by default its end of sequence, else that of the model beside
            it, or else one with a usual name.
        chat_template: the path of a Jinja file, in place of the tokenizer's own template.
        trust_remote_code: whether code that comes with the tokenizer may run.
        pixels: the sizes of images, for the processor in the same folder.

    Raises:
        ConfigError: there are ``pixels``, and no processor.
        JobFileError: the file doesn't exist, isn't a tokenizer, or has no token that ends a document; the chat template
            can't be read; or bytes are given what they have no use for.
    """
    if name == BYTES:
        if end_of_document is not None:
            raise JobFileError("data.end_of_document: the bytes tokenizer has its own; remove the key")
        if chat_template is not None:
            raise JobFileError("data.chat_template: bytes have no tokens for turns; name a data.tokenizer")
        return ByteTokenizer()
    path = snapshot("data.tokenizer", name) if is_hub_id(name) else Path(name)
    tokenizer = _load(path, trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = _read_template(Path(chat_template))
        if problem := check_template(tokenizer):
            raise JobFileError(f"data.chat_template: {chat_template}, {problem}")
    processor = None
    if path.is_dir() and has_processor(path):
        template = tokenizer.chat_template if chat_template is not None else None
        processor = MediaProcessor(path, tokenizer, template, pixels, trust_remote_code)
    elif pixels is not None:
        raise ConfigError(
            f"data.image_pixels: {name} has no processor of images ({', '.join(PROCESSOR_FILES)}); leave it out"
        )
    return PretrainedTokenizer(tokenizer, _end_of_document(tokenizer, name, path, end_of_document), processor)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder, such as that of a model's weights, holds a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def _load(path: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if path.is_file():
        folder = path.parent
    elif path.is_dir() and has_tokenizer(path):
        folder, path = path, path / _FILE
    else:
        missing = f"no tokenizer in {path}" if path.is_dir() else f"no file {path}"
        raise JobFileError(
            f"data.tokenizer: there is {missing}. Write bytes, the path of a tokenizer's folder or tokenizer.json, or "
            f"a Hub id.{nearest(path, BYTES)}"
        )
    alone = path.is_file() and not (path.name == _FILE and (folder / _CONFIG).is_file())
    try:
        if alone and path.name != _FILE:
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        if alone:  # with what lies beside it: AutoTokenizer wants to find a model there too
            return PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer_in(folder, trust_remote_code)
    except Exception as error:  # the libraries raise a bare Exception, and whatever a broken file leads to
        what = "is not a tokenizer.json" if alone else "can't be loaded as a tokenizer"
        raise JobFileError(f"data.tokenizer: {path if alone else folder} {what}: {first_line(error)}") from None


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        alike = "" if path.exists() else f".{nearest(path)}"
        raise JobFileError(f"data.chat_template: {path} can't be read as text: {error}{alike}") from None


def _end_of_document(tokenizer: PreTrainedTokenizerBase, name: str, path: Path, wanted: str | None) -> int:
    vocabulary = tokenizer.get_vocab()
    if wanted is not None:
        if wanted not in vocabulary:
            known = [*tokenizer.all_special_tokens, *(token for token in _USUAL_ENDS if token in vocabulary)]
            raise JobFileError(f"data.end_of_document: {name} has no token {wanted!r}. {did_you_mean(wanted, known)}")
        return vocabulary[wanted]
    if tokenizer.eos_token in vocabulary:
        return vocabulary[tokenizer.eos_token]
    stated = _stated_ends(path) if path.is_dir() or path.name == _FILE else []
    usual = [vocabulary[token] for token in _USUAL_ENDS if token in vocabulary]
    for end in (*(each for each in stated if each in vocabulary.values()), *usual):
        return end
    raise JobFileError(
        f"data.end_of_document: name the token of {name} that ends a document; it has none of the usual ones"
    )


def _stated_ends(path: Path) -> list[int]:
    """The tokens at which the model beside the tokenizer stops, as its files say."""
    found: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        try:
            config = json.loads(((path if path.is_dir() else path.parent) / name).read_text(encoding="utf-8"))
            found += [config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")]
        except (OSError, ValueError, AttributeError):
            continue
    return [end for each in found for end in (each if isinstance(each, list) else [each]) if type(end) is int]


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before a text, such as ``<s>``, and after it."""
    alone: Any = tokenizer("a", add_special_tokens=False, return_attention_mask=False)
    whole: Any = tokenizer("a", return_attention_mask=False)
    ids, inside = whole["input_ids"], alone["input_ids"]
    start = next((at for at in range(len(ids)) if ids[at : at + len(inside)] == inside), None)
    return ([], []) if start is None else (ids[:start], ids[start + len(inside) :])


def _end_in(document: Document, ends: Collection[int]) -> int | None:
    """The last token that is learned and among ``ends``; templates write no more than white space after it."""
    ids = document.ids if document.learned is None else document.ids[document.learned]
    return next((int(token) for token in ids[: -_AFTER_END - 2 : -1] if token in ends), None)


def _document(ids: Tokens, learned: Mask | None, end: int | None) -> Document:
    """The document, with ``end`` after it; an end is learned where anything is."""
    if end is None:
        return Document(ids, learned)
    return Document(np.append(ids, ids.dtype.type(end)), None if learned is None else np.append(learned, np.True_))
