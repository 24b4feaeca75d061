"""Tables that ``datasets`` reads: parquet, Arrow, the folders of ``save_to_disk``, and data sets of the Hub."""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from veomni_core.errors import VeOmniError
from veomni_trainer.data.files import DATASET, HUB
from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.tables import LIST, OTHER, TEXT, TURN, TURNS, Row
from veomni_trainer.job.source_keys import Source
from veomni_transformers.jobs.hub_snapshots import is_offline, one_at_a_time, snapshot
from veomni_transformers.jobs.job_files import first_line

_ROWS = 1000  # of a batch

Load = Callable[[Collection[str]], Any]


class DatasetTable:
    """A data set as a table.

    Args:
        load: gives the data set with some of its columns, or all of them without a name.
        what: what it should be, for messages.
    """

    unit, has_schema = "row", True

    def __init__(self, load: Load, what: str) -> None:
        self._load, self._what = load, what

    def columns(self) -> dict[str, str]:
        dataset = self._opened(())
        if dataset.features is None:  # of a stream whose files don't state them
            first: Any = next(iter(dataset.with_format("arrow").iter(1)), pyarrow.table({}))
            return _columns_of(first.schema)
        return _columns_of(dataset.features.arrow_schema)

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        number, batches = 0, self._opened(names).with_format("arrow").iter(_ROWS)
        try:
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: _without_nulls(row[name]) for name in names if name in row}
        except (pyarrow.ArrowException, datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            raise Unreadable(f"can't be read after row {number}: {first_line(error)}") from None

    def _opened(self, names: Collection[str]) -> Any:
        datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what it logs is raised too
        try:
            return self._load(names)
        except (Unreadable, VeOmniError):
            raise
        except Exception as error:  # datasets raises what its readers raise
            raise Unreadable(f"is not {self._what}: {first_line(error)}") from None


def open_table(path: Path, file_format: str, source: Source, streaming: bool) -> DatasetTable:
    """The table in a parquet or Arrow file, in the folder of a saved data set, or of the Hub's data set ``path``.

    Where it is ``streaming``, a data set of the Hub is read from there, and not downloaded first.
    """
    if file_format == DATASET:
        saved = cache(lambda: _split(datasets.load_from_disk(str(path)), source.split))
        return DatasetTable(lambda names: _chosen(saved(), names), "a saved dataset")
    if file_format == HUB:
        load = cache(partial(_from_hub, str(path), source, streaming))
        return DatasetTable(lambda names: _chosen(load(), names), "a data set that can be read")
    return DatasetTable(lambda names: _file(path, file_format, names), file_format)


def _file(path: Path, file_format: str, names: Collection[str]) -> Any:
    """A file's rows as they are read: neither the file nor its rows are copied to a cache."""
    options = {"columns": [*names]} if names and file_format == "parquet" else {}
    files = [glob.escape(str(path))]
    dataset = datasets.load_dataset(file_format, data_files=files, split="train", streaming=True, **options)
    return dataset if options else _chosen(dataset, names)


def _from_hub(name: str, source: Source, streaming: bool) -> Any:
    """The data set ``owner/name@commit``, from its files in the Hub's cache where the Hub can't be reached."""
    folder, identifier = snapshot("data.files", name, kind="dataset"), name.partition("@")[0]

    def load(at: str, **options: Any) -> Any:
        with one_at_a_time(identifier, "dataset"):
            loaded = datasets.load_dataset(at, source.subset, split=source.split, streaming=streaming, **options)
        return _split(loaded, None) if source.split is None else loaded

    if not is_offline():
        with suppress(ConnectionError):
            return load(identifier, revision=folder.name)
    return load(str(folder))


def _split(loaded: Any, wanted: str | None) -> Any:
    if not isinstance(loaded, dict):
        if wanted is not None:
            raise Unreadable(f"holds one dataset without splits; leave data.split {wanted!r} out")
        return loaded
    if wanted is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if wanted not in loaded:
        named = "data.split names none" if wanted is None else f"there is no split {wanted!r}"
        raise Unreadable(f"holds the splits {', '.join(loaded)}, and {named}; write one of them as data.split")
    return loaded[wanted]


def _chosen(dataset: Any, names: Collection[str]) -> Any:
    """The data set with the columns of those ``names`` that it has; with all of them without a name."""
    return dataset.select_columns([name for name in dataset.column_names if name in names]) if names else dataset


def _without_nulls(value: Any) -> Any:
    """Drop the keys without a value, at every depth: Arrow gives each object the keys of all objects of its column."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _columns_of(schema: Any) -> dict[str, str]:
    return {field.name: _kind(field.type) for field in schema}


def _kind(arrow_type: Any) -> str:
    types = pyarrow.types
    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    if types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type):
        return TEXT
    if not (types.is_list(arrow_type) or types.is_large_list(arrow_type)):
        return OTHER
    each = arrow_type.value_type
    return TURNS if types.is_struct(each) and any(each.get_field_index(key) >= 0 for key in TURN) else LIST
