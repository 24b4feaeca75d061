"""A distributed checkpoint whose pickles name code is refused, and the code doesn't run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from veomni_core.errors import CheckpointError
from veomni_trainer.output.shards import load_optimizer, refuse_code


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with an AdamW's state in ``optimizer``, as torch writes it."""
    layer = torch.nn.Linear(3, 4).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(layer, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    return tmp_path


def test_what_torch_writes_is_accepted(checkpoint: Path) -> None:
    refuse_code(checkpoint / "optimizer")


def test_an_index_that_names_code_is_refused(checkpoint: Path) -> None:
    planted = checkpoint / "planted"
    (checkpoint / "optimizer" / ".metadata").write_bytes(pickle.dumps(Planted(planted)))
    with pytest.raises(CheckpointError, match=r"it names posix.mkdir, which no checkpoint needs; it was not run"):
        load_optimizer(torch.nn.Linear(3, 4), None, checkpoint)  # type: ignore[arg-type]
    assert not planted.exists()


def test_a_setting_that_names_code_is_refused(checkpoint: Path) -> None:
    planted, folder = checkpoint / "planted", checkpoint / "optimizer"
    index: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = next(
        stored
        for at, stored in index.storage_data.items()
        if isinstance(index.state_dict_metadata[at.fqn], BytesStorageMetadata)
    )
    content = io.BytesIO()
    torch.save(Planted(planted), content)
    file = folder / stored.relative_path
    stored.offset, stored.length = file.stat().st_size, len(content.getvalue())
    file.write_bytes(file.read_bytes() + content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="does not fit this job"):
        load_optimizer(torch.nn.Linear(3, 4), None, checkpoint)  # type: ignore[arg-type]
    assert not planted.exists()
