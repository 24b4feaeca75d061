"""Checks a distributed checkpoint's pickles before torch reads them: its reader would run whatever code they name.

torch's distributed checkpoints hold an index (``.metadata``) and settings (``betas``, for example) as pickles. torch
2.13 reads both without ``weights_only``, and only tensors with it.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

_INDEX = ".metadata"
_NAMED_BY_INDEXES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}


class _IndexUnpickler(pickle.Unpickler):
    """Builds what an index consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMED_BY_INDEXES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs; it was not run")
        return super().find_class(module, name)


def refuse_code(folder: Path) -> None:
    """Raise unless the pickles of the distributed checkpoint in ``folder`` hold data alone. What they name doesn't run.

    Raises:
        pickle.UnpicklingError: a pickle names something else than an index, or a value, consists of.
        OSError, and what damaged bytes lead to: a file can't be read.
    """
    index: Metadata = _IndexUnpickler(io.BytesIO((folder / _INDEX).read_bytes())).load()
    for at, stored in index.storage_data.items():
        if isinstance(index.state_dict_metadata[at.fqn], BytesStorageMetadata):
            if stored.transform_descriptors:
                raise pickle.UnpicklingError(
                    f"{at.fqn} is stored by {stored.transform_descriptors}, which no run writes"
                )
            with (folder / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)
