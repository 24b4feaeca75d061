"""A job's documents as sequences: what is trained on, what is validated on, and what was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from veomni_core.errors import JobFileError
from veomni_trainer.data.batches import CHAT, Batcher, Metadata, learned_labels
from veomni_trainer.data.files import find_files
from veomni_trainer.data.media.processor import MediaProcessor
from veomni_trainer.data.orders import WeightedOrder
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.sequences import Counts, Sequence, Sequences, arrange
from veomni_trainer.data.streaming import Stream
from veomni_trainer.data.token_store import TokenStore, cached, default_cache, key_of, uncached, write_store
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.source_keys import Source
from veomni_transformers.packed.document_positions import DocumentPositions

Rows = Dataset[Sequence]

_FIRST = 64  # sequences of a stream that are looked at


@dataclass(frozen=True)
class ReadSource:
    """What was read of one source.

    Attributes:
        reading: which files were read, by which key of the job, and what was left out.
        counts: what became of their tokens.
        weight: how often it is drawn, relative to other sources.
        training: how many sequences are trained on.
        validation: how many are validated on.
        epochs: how often a training goes through it, on average over all seeds; ``None`` where nothing is drawn.
        learned: how many labels of the training sequences are learned, and how many of those for validation.
    """

    reading: Reading
    counts: Counts
    weight: float
    training: int
    validation: int
    epochs: float | None = None
    learned: tuple[int, int] = (0, 0)

    def describe(self) -> str:
        """Its part of the line for the terminal."""
        held_out = f", {self.validation:,} of them for validation" if self.validation else ""
        drawn = f"; weight {self.weight:g}, {self.epochs:,.1f} epochs" if self.epochs is not None else ""
        return f"{self.reading.describe()}; {self.counts.describe()}{held_out}{drawn}"

    def to_dict(self) -> dict[str, Any]:
        """The same, as JSON can hold it."""
        mixed = {"weight": self.weight, "epochs": self.epochs} if self.epochs is not None else {}
        sequences = {"training": self.training, "validation": self.validation}
        return {**self.reading.to_dict(), "description": self.describe(), **asdict(self.counts), **sequences, **mixed}


@dataclass(frozen=True)
class Corpus:
    """The sequences of a job.

    Attributes:
        training: what is trained on; a :class:`Stream` has no length.
        validation: what is validated on, by the key of the job that names it.
        read: what was read, by the same keys.
        padding: the token id that a batch is padded with.
        notes: what the user should hear of.
        draws: of a mixture, how many sequences a training takes.
        processor: the model's, of the media in the sequences; ``None`` where there are none.
        positions: of packed documents, for a model that takes four rows of them; ``None`` of others.
    """

    training: Rows | Stream
    validation: Mapping[str, Rows]
    read: tuple[ReadSource, ...]
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
            lines = [f"data: {self.read[0].describe()}"]
        else:
            stream = " a stream, tokenized while the model trains" if isinstance(self.training, Stream) else ""
            lines = [f"data:{stream}", *(f"  {source.reading.key}: {source.describe()}" for source in self.read)]
        details = [f"  {line}" for source in self.read for line in source.reading.details()]
        return "\n".join([*lines, *details, *self.notes])

    def batcher(self, multiple: int = 1, metadata: Metadata | None = None) -> Batcher:
        """What makes batches of its sequences; their padded lengths are multiples of ``multiple``.

        Those with media have what ``metadata`` gives for them too.
        """
        return Batcher(self.padding, multiple, self.processor, self.positions, metadata)

    @property
    def ends(self) -> dict[int, int]:
        """How many documents that are trained on are learned to end with which token; ``-1``: with none of its own."""
        readings = [source.reading.ends for source in self.read if source.training]
        totals: Counter[int] = Counter()
        for ends in [*readings, *([self.training.ends] if isinstance(self.training, Stream) else ())]:
            totals.update({int(token): count for token, count in ends.items()})
        return dict(totals)


def read_corpus(data: DataSection, tokenizer: Tokenizer, seed: int = 0) -> Corpus:
    """Read and tokenize the documents that ``data`` names, unless their tokens are stored, and make sequences of them.

    Of a stream, only what is validated on is read. ``seed`` decides which documents are packed together.

    Raises:
        JobFileError: there is nothing to read, a file is unreadable, or there are fewer tokens than one sequence.
        HostError: tokens can't be stored.
    """
    corpus = _read(data, tokenizer, seed)
    _check_learned(corpus, data)
    first = corpus.training.first(_FIRST) if isinstance(corpus.training, Stream) else ()
    if any(source.reading.media for source in corpus.read) or any(CHAT in each for each in first):
        return replace(corpus, processor=tokenizer.processor)
    return corpus


def _read(data: DataSection, tokenizer: Tokenizer, seed: int) -> Corpus:
    reader = _Reader(data, tokenizer, seed)
    rows: Rows
    parts: list[Rows] = []
    validation: dict[str, Rows] = {}
    read: list[ReadSource] = []
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
        read.append(replace(what, training=0, validation=what.training, learned=what.learned[::-1]))
    if data.streaming:
        training: Rows | Stream = Stream(data, tokenizer, seed)
    else:
        training = parts[0] if len(parts) == 1 else ConcatDataset(parts)
    notes = (*reader.notes, *_warnings(read, data.sequence_length))
    return Corpus(training, validation, tuple(read), tokenizer.end, notes)


def _divided(rows: Sequences, what: ReadSource, fraction: float) -> tuple[Rows, Rows, ReadSource]:
    """The part of a source that is trained on, and the one that is held out of it for validation.

    The latter's rows are evenly spaced, so that every part of the text is in both.
    """
    count, chosen = len(rows), round(len(rows) * fraction)
    if not 0 < chosen < count:
        raise JobFileError(
            f"data.validation_fraction: {fraction} of {count} sequences of {what.reading.key} leaves none to train on "
            "or none to validate"
        )
    mask = np.zeros(count, np.bool_)
    mask[((np.arange(chosen) + 0.5) * count / chosen).astype(int)] = True
    learned = int(rows.learned[mask].sum())
    # As arrays: lists of a large corpus' numbers would take gigabytes.
    indices: list[Any] = [np.flatnonzero(~mask), np.flatnonzero(mask)]
    training, validation = (Subset(rows, each) for each in indices)
    left = what.counts.learned - learned
    what = replace(what, training=count - chosen, validation=chosen, learned=(left, learned))
    return training, validation, what


class _Reader:
    """Makes sequences of sources, one after the other."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer, seed: int) -> None:
        self._data, self._tokenizer, self._seed = data, tokenizer, seed
        self.notes: list[str] = []

    def read(self, key: str, source: Source) -> tuple[Sequences, ReadSource]:
        """The sequences of ``source``, all of them counted as training."""
        data, store = self._data, self._store(key, source)
        end, skips = self._tokenizer.end, source.media_errors == "skip"
        sequences, counts = arrange(store, data.sequence_length, data.packing, end, self._seed, skips)
        if not counts.sequences:
            raise JobFileError(
                f"{key}: {counts.tokens:,} tokens are fewer than one sequence of {data.sequence_length:,} "
                "(data.sequence_length)"
            )
        reading = replace(store.reading, key=key)
        return sequences, ReadSource(
            reading, counts, source.weight, len(sequences), validation=0, learned=(counts.learned, 0)
        )

    def _store(self, key: str, source: Source) -> TokenStore:
        tokenizer, reading = self._tokenizer, Reading(key)
        documents = read_documents(source, tokenizer, reading)
        write = partial(write_store, documents=documents, reading=reading, vocabulary=tokenizer.vocab_size)
        if not self._data.cache:
            return uncached(write)
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
        if sources and not sum(source.learned[number] for source in sources):
            counts = "; ".join(f"{source.reading.key}: {source.counts.describe()}" for source in sources)
            raise JobFileError(
                f"data.sequence_length: {data.sequence_length} tokens hold nothing that is learned, {kind}: documents "
                f"are cut off before it, or hold nothing to learn ({counts}). Raise data.sequence_length, or write "
                "data.loss_on: all"
            )
    stream = corpus.training if isinstance(corpus.training, Stream) else None
    if stream and not any(learned_labels(each["labels"]) for each in stream.first(_FIRST)):
        raise JobFileError(
            f"data.sequence_length: the first {_FIRST} sequences of the stream hold nothing that is learned in "
            f"{data.sequence_length} tokens. Raise data.sequence_length, or write data.loss_on: all"
        )


def _warnings(read: Iterable[ReadSource], length: int) -> Iterator[str]:
    for source in read:
        left, whole = source.counts.learned, source.counts.learned_whole
        if 0 < left <= whole / 2:
            yield (
                f"warning: {source.reading.key}: {1 - left / whole:.0%} of the tokens that would be learned "
                f"({whole - left:,} of {whole:,}) lie past data.sequence_length {length:,}, and are not trained on"
            )


def _files_at(path: Path) -> list[Path]:
    """The file; of a folder that ``datasets`` saved, all files in it."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
