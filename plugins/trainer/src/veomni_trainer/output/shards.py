"""Checkpoints of a sharded model: each process writes and reads its own shards, in torch's distributed format.

Weights are ``shard-*.safetensors``, the optimizer's state is the folder ``optimizer``. Both name parameters and regions
of whole tensors, so they can be read under other sizes. ``layout.json`` says under which sizes they were written.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from veomni_core.errors import CheckpointError
from veomni_trainer.job.train_section import TrainSection
from veomni_transformers.jobs.job_files import first_line

_WEIGHTS = "shard-*-model-*.safetensors"
_OPTIMIZER = "optimizer"
LAYOUT = "layout.json"


# torch's distributed checkpoints hold an index and settings (``betas``, for example) as pickles. torch 2.13 reads both
# without ``weights_only``, and only tensors with it, so it would run whatever code they name.
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


def layout_of(train: TrainSection, processes: int) -> dict[str, int]:
    """The sizes under which ``processes`` processes write a checkpoint, and how many sequences one step takes."""
    batches = processes // train.ranks_per_batch * train.gradient_accumulation
    sizes = {key: getattr(train, key) for key in ("fsdp_size", "tp_size", "ep_size")}
    return {**sizes, "sequences_per_step": train.batch_size * batches}


def is_sharded(checkpoint: Path) -> bool:
    """Whether each process wrote its own shards into ``checkpoint``."""
    return any(checkpoint.glob(_WEIGHTS))


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write this process's shards of the weights into ``folder``. All processes call this.

    Tied weights are written twice: safetensors refuses tensors that share memory, and transformers 5.23 hands it them.
    """
    hook = model.register_state_dict_post_hook(_untie)
    try:
        model.save_pretrained(folder, distributed_checkpoint=True)
    finally:
        hook.remove()


def _untie(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    seen: set[int] = set()
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.data_ptr() in seen and local.numel():
            state[name] = tensor.clone()
        seen.add(local.data_ptr())


def save_optimizer(model: PreTrainedModel, optimizer: Optimizer, folder: Path) -> None:
    """Write this process's shards of the optimizer's state into ``folder``. All processes call this."""
    from transformers.distributed.checkpoint import save_optimizer_distributed

    save_optimizer_distributed(model, optimizer, str(folder / _OPTIMIZER))


def load_optimizer(model: PreTrainedModel, optimizer: Optimizer, checkpoint: Path) -> None:
    """Read this process's shards of the optimizer's state, whatever the sizes they were written under.

    Raises:
        CheckpointError: the state is missing, damaged, that of another model, or names code.
    """
    from transformers.distributed.checkpoint import load_optimizer_distributed

    try:
        refuse_code(checkpoint / _OPTIMIZER)
        load_optimizer_distributed(model, optimizer, str(checkpoint / _OPTIMIZER))
    except (Exception, CheckpointException) as error:  # errors of pickle, of files and of shapes; and torch's own
        raise CheckpointError(f"{checkpoint / _OPTIMIZER} does not fit this job: {reason(error)}") from error


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


def reason(error: BaseException) -> str:
    """What went wrong, in one line; of a ``CheckpointException`` what went wrong on the first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    kind, said = type(error).__name__, first_line(error)
    return kind if said == kind else f"{kind}: {said}"


def check_layout(checkpoint: Path, layout: dict[str, int]) -> None:
    """Check that a step of this job takes as many sequences as one of the checkpoint's.

    Raises:
        CheckpointError: it takes more or fewer, or the checkpoint's layout can't be read.
    """
    path = checkpoint / LAYOUT
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["sequences_per_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} does not say under which sizes the checkpoint was written: {error}") from error
    if before != (now := layout["sequences_per_step"]):
        raise CheckpointError(
            f"{checkpoint} was trained with {before} sequences per step (batch_size x "
            f"gradient_accumulation x processes that take different batches), and this job takes "
            f"{now}. Change train.batch_size or gradient_accumulation so that they are equal"
        )
