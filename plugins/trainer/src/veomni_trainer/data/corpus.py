"""A job's documents as sequences: what is trained on, what is validated on, and what was read."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from veomni_core.errors import JobFileError
from veomni_trainer.data.batches import CHAT, Batcher, Metadata, learned_labels
from veomni_trainer.data.files import find_files
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.data.media.sources import Medium
from veomni_trainer.data.orders import WeightedOrder
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.sequences import Sequence, Sequences, arrange
from veomni_trainer.data.streaming import Stream
from veomni_trainer.data.token_store import TokenStore, cached, default_cache, key_of, write_store
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.source_keys import Source
from veomni_transformers.packed.document_positions import DocumentPositions

Rows = Dataset[Sequence]

_SAMPLES = 64  # sequences that are hashed, or of a stream looked at


@dataclass(frozen=True)
class Corpus:
    """The sequences of a job.

    Attributes:
        training: what is trained on; a :class:`Stream` has no length.
        validation: what is validated on, by the key of the job that names it.
        read: what was read of each source.
        padding: the token id that a batch is padded with.
        notes: what the user should hear of.
        draws: of a mixture, how many sequences a training takes.
        processor: the model's, of the media in the sequences; ``None`` where there are none.
        positions: of packed documents, for a model that takes four rows of them; ``None`` of others.
    """

    training: Rows | Stream
    validation: Mapping[str, Rows]
    read: tuple[Reading, ...]
    padding: int
    notes: tuple[str, ...] = ()
    draws: int = 0
    processor: MediaProcessor | None = None
    positions: DocumentPositions | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether sequences are drawn from several stored sources."""
        return isinstance(self.training, ConcatDataset)

    @property
    def sequences(self) -> int | None:
        """How many sequences are trained on; ``None`` of a stream."""
        return None if isinstance(self.training, Stream) else sum(source.training for source in self.read)

    def drawn(self, draws: int) -> Corpus:
        """The same for a training that takes ``draws`` sequences; they are drawn only of several stored sources."""
        if not self.is_mixed:
            return self
        epochs = iter(replace(self, draws=draws).order(seed=0).passes())
        read = (replace(each, epochs=next(epochs)) if each.training else each for each in self.read)
        return replace(self, draws=draws, read=tuple(read))

    def order(self, seed: int) -> WeightedOrder:
        """The order in which the sequences of several sources are drawn."""
        sources = [source for source in self.read if source.training]
        sizes, weights = [source.training for source in sources], [source.weight for source in sources]
        return WeightedOrder(sizes, weights, self.draws, seed)

    def describe(self) -> str:
        """A line for the terminal, and one for each of several sources."""
        if len(self.read) == 1 and not isinstance(self.training, Stream):
            lines = [f"data: {self.read[0].describe_all()}"]
        else:
            stream = " a stream, tokenized while the model trains" if isinstance(self.training, Stream) else ""
            lines = [f"data:{stream}", *(f"  {source.key}: {source.describe_all()}" for source in self.read)]
        details = [f"  {line}" for source in self.read for line in source.details()]
        return "\n".join([*lines, *details, *self.notes])

    def batcher(self, multiple: int = 1, metadata: Metadata | None = None) -> Batcher:
        """What makes batches of its sequences; their padded lengths are multiples of ``multiple``.

        Those with media have what ``metadata`` gives for them too.
        """
        return Batcher(self.padding, multiple, self.processor, self.positions, metadata)

    @property
    def ends(self) -> dict[int, int]:
        """How many documents that are trained on are learned to end with which token; ``-1``: with none of its own."""
        readings = [source.ends for source in self.read if source.training]
        totals: Counter[int] = Counter()
        for ends in [*readings, *([self.training.ends] if isinstance(self.training, Stream) else ())]:
            totals.update({int(token): count for token, count in ends.items()})
        return dict(totals)

    def fingerprint(self, made: Mapping[str, Any]) -> str:
        """The number of training sequences and a hash, as JSON: whether two jobs train on the same.

        It is that of all rows, which have no tokens yet: ``made``, which is put beside it, names what makes them; or
        that of all tokens, and of some sequences, which tell how tokens were arranged. Of a stream it takes the first
        sequences.
        """
        digest = sha256("".join(source.checksum for source in self.read if source.training).encode())
        training: Any = self.training
        if isinstance(training, Stream):
            some = training.first(_SAMPLES)
        elif made["tokens"]:
            some = training.with_transform(_hashed) if self.processor else training
        else:
            chosen = np.unique(np.linspace(0, len(training) - 1, _SAMPLES).astype(int))
            some = (training[int(index)] for index in chosen)
        for sequence in some:
            for name, values in sorted(sequence.items()):
                digest.update(name.encode() + _as_bytes(values))
        return json.dumps({"sequences": self.sequences, "sha256": digest.hexdigest(), **made})


def read_corpus(data: DataSection, tokenizer: Tokenizer, seed: int = 0) -> Corpus:
    """Read and tokenize the documents that ``data`` names, unless their tokens are stored, and make sequences of them.

    Of a stream, only what is validated on is read. ``seed`` decides which documents are packed together.

    Raises:
        JobFileError: there is nothing to read, a file is unreadable, or there are fewer tokens than one sequence.
        HostError: tokens can't be stored.
    """
    corpus = _read(data, tokenizer, seed)
    _check_learned(corpus, data)
    first = corpus.training.first(_SAMPLES) if isinstance(corpus.training, Stream) else ()
    if any(source.media for source in corpus.read) or any(CHAT in each for each in first):
        return replace(corpus, processor=tokenizer.processor)
    return corpus


def _read(data: DataSection, tokenizer: Tokenizer, seed: int) -> Corpus:
    reader = _Reader(data, tokenizer, seed)
    rows: Rows
    parts: list[Rows] = []
    validation: dict[str, Rows] = {}
    read: list[Reading] = []
    for key, source in data.training_sources.items():
        if data.streaming:
            find_files(source, Reading(key))  # so that a file that isn't there is missed now
            continue
        rows, what = reader.read(key, source)
        if data.validation_fraction:
            rows, validation[key], what = _divided(rows, what, data.validation_fraction)
        parts.append(rows)
        read.append(what)
    for key, source in data.validation_source.items():
        validation[key], what = reader.read(key, source)
        read.append(replace(what, training=0, validation=what.training, learned_validation=what.learned))
    if data.streaming:
        training: Rows | Stream = Stream(data, tokenizer, seed)
    else:
        training = parts[0] if len(parts) == 1 else ConcatDataset(parts)
    notes = (*reader.notes, *_warnings(read, data.sequence_length))
    return Corpus(training, validation, tuple(read), tokenizer.end, notes)


def _divided(rows: Sequences, what: Reading, fraction: float) -> tuple[Rows, Rows, Reading]:
    """The part of a source that is trained on, and the one that is held out of it for validation.

    The latter's rows are evenly spaced, so that every part of the text is in both.
    """
    count, chosen = len(rows), round(len(rows) * fraction)
    if not 0 < chosen < count:
        raise JobFileError(
            f"data.validation_fraction: {fraction} of {count} sequences of {what.key} leaves none to train on "
            "or none to validate"
        )
    mask = np.zeros(count, np.bool_)
    mask[((np.arange(chosen) + 0.5) * count / chosen).astype(int)] = True
    learned = int(rows.learned[mask].sum())
    # As arrays: lists of a large corpus' numbers would take gigabytes.
    indices: list[Any] = [np.flatnonzero(~mask), np.flatnonzero(mask)]
    training, validation = (Subset(rows, each) for each in indices)
    what = replace(what, training=count - chosen, validation=chosen, learned_validation=learned)
    return training, validation, what


class _Reader:
    """Makes sequences of sources, one after the other."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer, seed: int) -> None:
        self._data, self._tokenizer, self._seed = data, tokenizer, seed
        self.notes: list[str] = []

    def read(self, key: str, source: Source) -> tuple[Sequences, Reading]:
        """The sequences of ``source``, all of them counted as training."""
        data, store = self._data, self._store(key, source)
        end, skips = self._tokenizer.end, source.media_errors == "skip"
        sequences, reading = arrange(store, data.sequence_length, data.packing, end, self._seed, skips)
        if not reading.sequences:
            raise JobFileError(
                f"{key}: {reading.tokens:,} tokens are fewer than one sequence of {data.sequence_length:,} "
                "(data.sequence_length)"
            )
        return sequences, replace(reading, key=key, weight=source.weight)

    def _store(self, key: str, source: Source) -> TokenStore:
        tokenizer, reading = self._tokenizer, Reading(key)
        documents = read_documents(source, tokenizer, reading)
        write = partial(write_store, documents=documents, reading=reading, vocabulary=tokenizer.vocab_size)
        if not self._data.cache:
            with tempfile.TemporaryDirectory(prefix="veomni-tokens-") as name:  # a file that is mapped may be removed
                return cached(Path(name) / "store", write, self.notes)
        files = [path for found in find_files(source, Reading(key)) for path in _files_at(found.path)]
        facts = source.model_dump(exclude={"files", "weight"})
        if (processor := self._tokenizer.processor) is not None:  # paths of media go from there
            facts["media"] = processor.taken
            facts["folders"] = sorted({str(path.parent.absolute()) for path in files})
        folder = Path(self._data.cache) if isinstance(self._data.cache, str) else default_cache()
        return cached(folder / key_of(files, source=facts, tokenizer=tokenizer.fingerprint), write, self.notes)


def _check_learned(corpus: Corpus, data: DataSection) -> None:
    """Raise JobFileError where nothing is left to learn; warn in the corpus' notes where half of it is cut off."""
    for number, kind in enumerate(("to train on", "to validate on")):
        sources = [source for source in corpus.read if (source.training, source.validation)[number]]
        learned = [(each.learned - each.learned_validation, each.learned_validation)[number] for each in sources]
        if sources and not sum(learned):
            counts = "; ".join(f"{source.key}: {source.describe_sequences()}" for source in sources)
            raise JobFileError(
                f"data.sequence_length: {data.sequence_length} tokens hold nothing that is learned, {kind}: documents "
                f"are cut off before it, or hold nothing to learn ({counts}). Raise data.sequence_length, or write "
                "data.loss_on: all"
            )
    stream = corpus.training if isinstance(corpus.training, Stream) else None
    if stream and not any(learned_labels(each["labels"]) for each in stream.first(_SAMPLES)):
        raise JobFileError(
            f"data.sequence_length: the first {_SAMPLES} sequences of the stream hold nothing that is learned in "
            f"{data.sequence_length} tokens. Raise data.sequence_length, or write data.loss_on: all"
        )


def _warnings(read: Iterable[Reading], length: int) -> Iterator[str]:
    for source in read:
        left, whole = source.learned, source.learned_whole
        if 0 < left <= whole / 2:
            yield (
                f"warning: {source.key}: {1 - left / whole:.0%} of the tokens that would be learned "
                f"({whole - left:,} of {whole:,}) lie past data.sequence_length {length:,}, and are not trained on"
            )


def _files_at(path: Path) -> list[Path]:
    """The file; of a folder that ``datasets`` saved, all files in it."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _hashed(rows: dict[str, Any]) -> dict[str, Any]:
    """The rows with hashes of their images' bytes."""
    digests = [[sha256(Medium("image", **each).read()).hexdigest() for each in images] for images in rows["images"]]
    return {**rows, "images": digests}


def _as_bytes(value: Any) -> bytes:
    """A tensor's numbers; of chats with media their text; what else is in a row, as JSON."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return "".join(chat.text for _, chat in value).encode()
    return value.numpy().tobytes() if isinstance(value, Tensor) else json.dumps(value, default=str).encode()
