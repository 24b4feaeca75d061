"""Checkpoints of a sharded model: each process writes and reads its own shards, in torch's distributed format.

Weights are ``shard-*.safetensors``, the optimizer's state is the folder ``optimizer``. Both name parameters and regions
of whole tensors, so they can be read under other sizes. ``layout.json`` says under which sizes they were written.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from veomni_core.errors import CheckpointError
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.output.unpickling import refuse_code
from veomni_transformers.jobs.job_files import first_line

_WEIGHTS = "shard-*-model-*.safetensors"
_OPTIMIZER = "optimizer"
LAYOUT = "layout.json"


@dataclass(frozen=True)
class Layout:
    """The sizes under which a checkpoint was written, and how many sequences one step took."""

    fsdp_size: int
    tp_size: int
    ep_size: int
    sequences_per_step: int

    @classmethod
    def of(cls, train: TrainSection, processes: int) -> Layout:
        """The layout of a job of ``processes`` processes."""
        batches = processes // train.ranks_per_batch * train.gradient_accumulation
        return cls(train.fsdp_size, train.tp_size, train.ep_size, train.batch_size * batches)

    def to_json(self) -> str:
        """The content of ``layout.json``."""
        return json.dumps(asdict(self))


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


def reason(error: BaseException) -> str:
    """What went wrong, in one line; of a ``CheckpointException`` what went wrong on the first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    kind, said = type(error).__name__, first_line(error)
    return kind if said == kind else f"{kind}: {said}"


def check_layout(checkpoint: Path, layout: Layout) -> None:
    """Check that a step of this job takes as many sequences as one of the checkpoint's.

    Raises:
        CheckpointError: it takes more or fewer, or the checkpoint's layout can't be read.
    """
    path = checkpoint / LAYOUT
    try:
        before = Layout(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} does not say under which sizes the checkpoint was written: {error}") from error
    if before.sequences_per_step != layout.sequences_per_step:
        raise CheckpointError(
            f"{checkpoint} was trained with {before.sequences_per_step} sequences per step (batch_size x "
            f"gradient_accumulation x processes that take different batches), and this job takes "
            f"{layout.sequences_per_step}. Change train.batch_size or gradient_accumulation so that they are equal"
        )
