"""Tables that pyarrow reads, batch by batch: parquet, arrow, and the folders of ``datasets``' ``save_to_disk``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from veomni_trainer.data.reading import BadLine, Unreadable
from veomni_trainer.data.tables import LIST, OTHER, TEXT, TURN, TURNS, Row

_ROWS = 1000  # of a batch


class ParquetTable:
    """A parquet file; only the columns that are asked for are read."""

    unit, has_schema = "row", True

    def __init__(self, path: Path) -> None:
        self._path = path

    def columns(self) -> dict[str, str]:
        with self._open() as file:
            return _columns_of(file.schema_arrow)

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        with self._open() as file:
            wanted = [name for name in file.schema_arrow.names if name in names]
            yield from _rows_of(file.iter_batches(batch_size=_ROWS, columns=wanted))

    def _open(self) -> Any:
        try:
            return pyarrow.parquet.ParquetFile(self._path)
        except (pyarrow.ArrowException, OSError) as error:
            raise Unreadable(f"is not parquet: {_first_line(error)}") from None


class ArrowTable:
    """An Arrow file (feather) or Arrow stream; the system pages it in while it is read."""

    unit, has_schema = "row", True

    def __init__(self, path: Path) -> None:
        self._path = path

    def columns(self) -> dict[str, str]:
        return _columns_of(self._open()[0])

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        schema, batches = self._open()
        wanted = [name for name in schema.names if name in names]
        yield from _rows_of(part.select(wanted) for part in _cut(batches))

    def _open(self) -> tuple[Any, Iterable[Any]]:
        try:
            source = pyarrow.memory_map(str(self._path))
            try:
                file = pyarrow.ipc.open_file(source)
                return file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
            except pyarrow.ArrowInvalid:
                stream = pyarrow.ipc.open_stream(pyarrow.memory_map(str(self._path)))
                return stream.schema, stream
        except (pyarrow.ArrowException, OSError) as error:
            raise Unreadable(f"is not arrow: {_first_line(error)}") from None


class SavedDataset:
    """A folder that ``datasets``' ``save_to_disk`` wrote. A ``DatasetDict`` has splits, of which one is read."""

    unit, has_schema = "row", True

    def __init__(self, path: Path, split: str | None) -> None:
        import datasets

        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:  # datasets raises what its readers raise
            raise Unreadable(f"is not a saved dataset: {_first_line(error)}") from None
        self._dataset = _split(loaded, split).with_format("arrow")

    def columns(self) -> dict[str, str]:
        return _columns_of(self._dataset.features.arrow_schema)

    def rows(self, names: Collection[str]) -> Iterator[tuple[int, Row | BadLine]]:
        wanted = [name for name in self._dataset.column_names if name in names]
        yield from _rows_of(self._dataset.select_columns(wanted).iter(_ROWS))


def _split(loaded: Any, wanted: str | None) -> Any:
    import datasets

    if not isinstance(loaded, datasets.DatasetDict):
        if wanted is not None:
            raise Unreadable(f"holds one dataset without splits; leave data.split {wanted!r} out")
        return loaded
    if wanted is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if wanted not in loaded:
        named = "data.split names none" if wanted is None else f"there is no split {wanted!r}"
        raise Unreadable(f"holds the splits {', '.join(loaded)}, and {named}; write one of them as data.split")
    return loaded[wanted]


def _cut(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches in parts: writers make batches as large as the file."""
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS)


def _rows_of(batches: Iterable[Any]) -> Iterator[tuple[int, Row | BadLine]]:
    number = 0
    try:
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, {name: _without_nulls(value) for name, value in row.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise Unreadable(f"can't be read after row {number}: {_first_line(error)}") from None


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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
