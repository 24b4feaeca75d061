"""The safetensors files of one folder: headers at once, values slice by slice. No more than a slice is in memory."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from veomni_core.errors import CheckpointError
from veomni_transformers.weights import check_weights

MARK = "veomni.experts"  # the key of a file's metadata that holds the layout of the experts in it
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_OPEN_FILES = 4
_MAPPED = 2**27  # bytes read of one file until it is opened anew: pages that were read count as memory until then
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file's header describes it; ``dtype`` is safetensors' name, such as ``BF16``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


def itemsize(dtype: str) -> int:
    """The bytes of one element of a dtype by safetensors' name.

    Example:
        >>> itemsize("BF16"), itemsize("F8_E4M3"), itemsize("BOOL")
        (2, 1, 1)
    """
    digits = "".join(each for each in dtype.partition("_")[0] if each.isdigit())
    return _BYTES[digits or "8"]


class WeightFiles:
    """The tensors of a folder of safetensors files.

    Args:
        folder: the folder. With an index, the files that it names; without, all ``*.safetensors``.

    Raises:
        CheckpointError: there are no such files, one of them is missing, damaged or truncated, two of them hold one
            tensor, or the index names a tensor that its file lacks; or it is an adapter, or a sharded checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        _refuse_others(folder)
        check_weights(folder)
        self.folder = folder
        self.marks: dict[Path, str] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._handles: OrderedDict[Path, Any] = OrderedDict()
        self._read: dict[Path, int] = {}
        index = _index(folder)
        for file in _named(folder, index):
            for stored in self._header(file):
                if stored.name in self.tensors:
                    other = self.tensors[stored.name].file.name
                    raise CheckpointError(
                        f"{folder}: {stored.name} is in {other} and in {file.name}. Remove the files of other weights"
                    )
                self.tensors[stored.name] = stored
        _compare(folder, index, self.tensors)
        self.files = list(dict.fromkeys(each.file for each in self.tensors.values()))  # that hold tensors, in order

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors.values())

    def rows(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """``tensor[start:stop]``, still in the file: it is read where it is used. Without bounds, the whole tensor."""
        stored = self.tensors[name]
        handle = self._opened(stored.file)
        if start is None or not stored.shape:
            self._read[stored.file] += stored.nbytes
            return handle.get_tensor(name)  # type: ignore[no-any-return]
        assert stop is not None
        self._read[stored.file] += (stop - start) * stored.nbytes // max(1, stored.shape[0])
        return handle.get_slice(name)[start:stop]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close all files."""
        self._handles.clear()

    def _opened(self, file: Path) -> Any:
        if self._read.get(file, 0) > _MAPPED:
            self._handles.pop(file, None)
        if file not in self._handles:
            self._handles[file] = safe_open(file, "pt").__enter__()
            self._read[file] = 0
            while len(self._handles) > _OPEN_FILES:
                self._handles.popitem(last=False)
        self._handles.move_to_end(file)
        return self._handles[file]

    def _header(self, file: Path) -> Iterator[StoredTensor]:
        try:
            with safe_open(file, "pt") as opened:
                if mark := (opened.metadata() or {}).get(MARK):
                    self.marks[file] = mark
                for name in list(opened.keys()):
                    tensor = opened.get_slice(name)
                    yield StoredTensor(name, file, str(tensor.get_dtype()), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} can't be read: {error}. Copy or download it again") from error


def _refuse_others(folder: Path) -> None:
    """Raise if the folder holds something else than the weights of a whole model."""
    if not folder.is_dir():
        what = "a file; give the folder that it is in" if folder.exists() else "not there"
        raise CheckpointError(f"{folder} is {what}")
    if any(folder.glob("adapter_model*")):
        raise CheckpointError(
            f"{folder} holds an adapter and not a model's weights. Merge it first: veomni export --merge"
        )
    if any(folder.glob("shard-*-model-*.safetensors")) or any(folder.glob("*.distcp")):
        raise CheckpointError(f"{folder} holds the shards of a training run. Join them first: veomni export RUN FOLDER")
    pickled = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    if pickled and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds its weights as {pickled[0]}, which is a pickle: reading it runs code. Load it once by "
            "from_pretrained and save it by save_pretrained, which writes safetensors"
        )
    if not any(folder.glob("*.safetensors")):
        there = sorted(path.name for path in folder.iterdir())
        shown = f"only {', '.join(there[:3])}{' and more' if len(there) > 3 else ''}" if there else "nothing"
        raise CheckpointError(f"{folder} holds no weights: there is no *.safetensors in it, {shown}")


def _index(folder: Path) -> Mapping[str, str] | None:
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(f"{folder} has {len(found)} indices: {', '.join(path.name for path in found)}. Leave one")
    return json.loads(found[0].read_text(encoding="utf-8"))["weight_map"] if found else None  # type: ignore[no-any-return]


def _named(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    return (
        sorted(folder.glob("*.safetensors")) if index is None else [folder / name for name in sorted({*index.values()})]
    )


def _compare(folder: Path, index: Mapping[str, str] | None, tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in (index or {}).items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{folder}: the index says that {name} is in {file}, and it isn't. Copy both again")
