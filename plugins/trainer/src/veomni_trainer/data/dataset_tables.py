"""Tables that ``datasets`` reads: parquet, Arrow, the folders of ``save_to_disk``, and data sets of the Hub."""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow

from veomni_core.errors import VeOmniError
from veomni_trainer.data.files import DATASET, FoundFile, format_of
from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.tables import LIST, OTHER, TEXT, TURN, TURNS, ClassNumber, Row, kind_of
from veomni_trainer.job.source_keys import Source
from veomni_transformers.jobs.hub_snapshots import is_offline, one_at_a_time, snapshot
from veomni_transformers.jobs.job_files import first_line

_ROWS = 1000  # of a batch
_READ_HERE = {"csv": ("csv", "tsv"), "json": ("json", "jsonl"), "text": ("text",)}  # by the name of datasets' builder
_NOT_OF_READING = {each.name for each in fields(datasets.BuilderConfig)} | {"sep", "delimiter"}

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
        features = self._opened(()).features
        stated = features.arrow_schema if features else None  # files of a stream may not state them
        unsaid = [field.name for field in stated or () if _is_json(field.type)]
        if stated is not None and not unsaid:
            return _columns_of(stated)
        first: Any = next(iter(self._opened(unsaid).with_format("arrow").iter(1)), pyarrow.table({}))
        values = next(_rows_of(first, features), {})
        said = {field.name: kind_of(values.get(field.name)) for field in first.schema if _is_json(field.type)}
        return _columns_of(stated or first.schema) | said

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        number, dataset = 0, self._opened(names)
        try:
            for batch in dataset.with_format("arrow").iter(_ROWS):
                for row in _rows_of(batch, dataset.features):
                    number += 1
                    yield number, {name: row[name] for name in names if name in row}
        except (pyarrow.ArrowException, datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            raise Unreadable(f"can't be read after row {number}: {first_line(error)}") from None

    def _opened(self, names: Collection[str]) -> Any:
        with self._naming_errors():
            return self._load(names)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what it logs is raised too
        try:
            yield
        except (Unreadable, VeOmniError):
            raise
        except Exception as error:  # datasets raises what its readers raise
            raise Unreadable(f"is not {self._what}: {first_line(error)}") from None


class HubTable(DatasetTable):
    """The data set ``owner/name@commit`` of the Hub, from its files in the Hub's cache where that can't be reached.

    Where it is ``streaming``, it is read from there, and not downloaded first.
    """

    def __init__(self, name: str, source: Source, streaming: bool) -> None:
        super().__init__(lambda names: _chosen(self._dataset, names), "a data set that can be read")
        self._name, self._source, self._streaming = name, source, streaming
        self._identifier, _, self._commit = name.partition("@")

    def files(self) -> list[FoundFile]:
        """Its files, where they are of formats that are read without ``datasets``, and all columns are plain values.

        Of those, ``datasets`` takes ``007`` for 7 and ``None`` for no value, and gives all rows the keys of each.
        """
        with self._naming_errors():
            builder, split = self._builder, self._source.split
            config, features, splits = builder.config, builder.info.features, builder.config.data_files or {}
            stated = {each.name for each in fields(config) if getattr(config, each.name) != each.default}
            paths = splits.get(split, []) if split or len(splits) != 1 else next(iter(splits.values()))
            formats = {path: self._source.format or format_of(Path(path)) for path in paths}
            if not paths or stated - _NOT_OF_READING or {*formats.values()} - {*_READ_HERE.get(builder.name, ())}:
                return []
            if features is not None and not _is_plain({**features}):
                return []
            separator = getattr(config, "sep", ",") if "sep" in stated else None
            return [
                FoundFile(path, self._name, True, formats[each], None if formats[each] == "tsv" else separator)
                for each, path in zip(paths, self._located(paths), strict=True)
            ]

    def _located(self, paths: list[str]) -> list[Path]:
        """The files on this machine, or where they are streamed from."""
        start = f"hf://datasets/{self._name}/"
        if self._streaming or not all(path.startswith(start) for path in paths):
            return [*map(Path, paths)]
        names = [path.removeprefix(start) for path in paths]
        with one_at_a_time(self._identifier, "dataset"):
            folder = huggingface_hub.snapshot_download(
                self._identifier,
                repo_type="dataset",
                revision=self._commit,
                allow_patterns=[*map(glob.escape, names)],
            )
        return [Path(folder, name) for name in names]

    @cached_property
    def _builder(self) -> Any:
        folder, subset = snapshot("data.files", self._name, kind="dataset"), self._source.subset
        with one_at_a_time(self._identifier, "dataset"):
            if not is_offline():
                with suppress(ConnectionError):
                    return datasets.load_dataset_builder(self._identifier, subset, revision=folder.name)
            return datasets.load_dataset_builder(str(folder), subset)

    @cached_property
    def _dataset(self) -> Any:
        builder, split = self._builder, self._source.split
        if self._streaming:
            loaded = builder.as_streaming_dataset(split=split)
        else:
            with one_at_a_time(self._identifier, "dataset"):
                builder.download_and_prepare()
            loaded = builder.as_dataset(split=split)
        return _split(loaded, None) if split is None else loaded


def open_table(path: Path, file_format: str, source: Source) -> DatasetTable:
    """The table in a parquet or Arrow file, or in the folder of a saved data set."""
    if file_format == DATASET:
        saved = cache(lambda: _split(datasets.load_from_disk(str(path)), source.split))
        return DatasetTable(lambda names: _chosen(saved(), names), "a saved dataset")
    return DatasetTable(lambda names: _file(path, file_format, names), file_format)


def _file(path: Path, file_format: str, names: Collection[str]) -> Any:
    """A file's rows as they are read: neither the file nor its rows are copied to a cache."""
    options = {"columns": [*names]} if names and file_format == "parquet" else {}
    files = [glob.escape(str(path))]
    dataset = datasets.load_dataset(file_format, data_files=files, split="train", streaming=True, **options)
    return dataset if options else _chosen(dataset, names)


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


def _rows_of(batch: Any, features: Any) -> Iterator[dict[str, Any]]:
    types = {field.name: field.type for field in batch.schema}
    classes = {name: each.names for name, each in (features or {}).items() if isinstance(each, datasets.ClassLabel)}
    for row in batch.to_pylist():
        values = {name: _decoded(value, types[name]) for name, value in row.items()}
        numbers = {
            name: ClassNumber(values[name], each) for name, each in classes.items() if values.get(name) is not None
        }
        yield values | numbers


def _decoded(value: Any, arrow_type: Any) -> Any:
    """The value without the keys of mappings that have none: Arrow gives each the keys of all of its column."""
    if isinstance(value, dict):
        types = {field.name: field.type for field in arrow_type}
        return {key: _decoded(each, types[key]) for key, each in value.items() if each is not None}
    if isinstance(value, list) and (_is_list(arrow_type)):
        return [_decoded(each, arrow_type.value_type) for each in value]
    return json.loads(value) if isinstance(arrow_type, pyarrow.JsonType) and value is not None else value


def _columns_of(schema: Any) -> dict[str, str]:
    return {field.name: _kind(field.type) for field in schema}


def _kind(arrow_type: Any) -> str:
    types = pyarrow.types
    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    if types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type):
        return TEXT
    if not _is_list(arrow_type):
        return OTHER
    each = arrow_type.value_type
    return TURNS if types.is_struct(each) and any(each.get_field_index(key) >= 0 for key in TURN) else LIST


def _is_list(arrow_type: Any) -> bool:
    return any(getattr(pyarrow.types, f"is_{kind}list")(arrow_type) for kind in ("", "large_", "fixed_size_"))


def _is_json(arrow_type: Any) -> bool:
    """Whether its values are JSON, or lists of it, so that they alone say what they hold."""
    return isinstance(arrow_type.value_type if _is_list(arrow_type) else arrow_type, pyarrow.JsonType)


def _is_plain(feature: Any) -> bool:
    """Whether a feature of ``datasets`` says no more than its values in JSON."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return _is_plain(feature.feature)
    return isinstance(feature, (datasets.Value, datasets.Json))
