"""Sequences of documents that are tokenized while the model trains, for what fits neither memory nor disk.

Data sets of the Hub are streamed by ``datasets``. Drawing and shuffling are done here: ``interleave_datasets`` turns
each sequence into Arrow and back into lists, which takes ten times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, islice

import numpy as np
from torch.utils.data import IterableDataset

from veomni_trainer.data.documents import Document
from veomni_trainer.data.orders import drawn_sources
from veomni_trainer.data.read import read_documents
from veomni_trainer.data.reading import Reading
from veomni_trainer.data.sequences import Sequence, arrange
from veomni_trainer.data.token_store import TokenStore, store_in_memory
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.data_section import DataSection
from veomni_trainer.job.source_keys import Source

_WINDOW = 64  # so many sequences' tokens are arranged at once
_SHUFFLE_BUFFER = 1024


class Stream(IterableDataset[Sequence]):
    """The sequences of a job's sources, without an end: a source that was read whole is read again.

    Their order depends on the files, the job's ``data`` section and the seed alone. So a resumed run finds the place
    where it stopped by reading again what it had trained on.

    Args:
        data: the section, with the sources.
        tokenizer: that of the job.
        seed: of the order.
        ends: how many of the documents read so far are learned to end with which token, as of :class:`Reading`.
    """

    def __init__(self, data: DataSection, tokenizer: Tokenizer, seed: int, ends: Counter[str] | None = None) -> None:
        self._data, self._tokenizer, self._seed = data, tokenizer, seed
        self.ends: Counter[str] = Counter() if ends is None else ends
        self._batch_size = self._ranks_per_batch = 1

    def in_batches(self, batch_size: int, ranks_per_batch: int) -> Stream:
        """The same stream, in which each batch comes once for each of the neighbouring ranks that train on it."""
        stream = Stream(self._data, self._tokenizer, self._seed, self.ends)
        stream._batch_size, stream._ranks_per_batch = batch_size, ranks_per_batch
        return stream

    def __iter__(self) -> Iterator[Sequence]:
        order = self._shuffled(self._mixed(self._data.training_sources))
        while batch := list(islice(order, self._batch_size)):
            for _ in range(self._ranks_per_batch):
                yield from batch

    def first(self, count: int) -> Iterator[Sequence]:
        """The first sequences as they are read, before any is shuffled."""
        return islice(self._mixed(self._data.training_sources), count)

    def _mixed(self, sources: Mapping[str, Source]) -> Iterator[Sequence]:
        """Each next sequence is of a source that is drawn by weight."""
        streams = [self._of_source(key, source) for key, source in sources.items()]
        for source in drawn_sources([source.weight for source in sources.values()], self._seed):
            yield next(streams[source])

    def _shuffled(self, sequences: Iterator[Sequence]) -> Iterator[Sequence]:
        """Each next sequence is drawn from a buffer, and its place is filled by the one that is read."""
        buffer = list(islice(sequences, self._data.shuffle_buffer or _SHUFFLE_BUFFER))
        generator = np.random.default_rng((self._seed, len(buffer)))
        for sequence in sequences:
            place = int(generator.integers(len(buffer)))
            yield buffer[place]
            buffer[place] = sequence

    def _of_source(self, key: str, source: Source) -> Iterator[Sequence]:
        for number, window in enumerate(self._windows(key, source)):
            data = self._data
            end, skips = self._tokenizer.end, source.media_errors == "skip"
            yield from arrange(window, data.sequence_length, data.packing, end, self._seed + number, skips)[0]

    def _windows(self, key: str, source: Source) -> Iterator[TokenStore]:
        """The source's documents, some at a time; joined text goes on in the next window."""
        enough = _WINDOW * self._data.sequence_length
        documents: list[Document] = []
        tokens = 0
        for document in self._passes(key, source):
            documents.append(document)
            tokens += len(document.ids)
            if tokens < enough:
                continue
            window = store_in_memory(documents)
            yield window
            documents, tokens = [], 0
            if window.learned is None and not self._data.packing:
                tokens = len(window.ids) % self._data.sequence_length
                documents = [Document(window.ids[len(window.ids) - tokens :])] if tokens else []

    def _passes(self, key: str, source: Source) -> Iterator[Document]:
        for _ in count():
            yield from read_documents(source, self._tokenizer, Reading(key, ends=self.ends), streaming=True)
