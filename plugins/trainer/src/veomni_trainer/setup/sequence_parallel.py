"""Groups processes that share sequences, and checks that a job's model supports it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments

from veomni_core import OpsConfig
from veomni_core.errors import HostError
from veomni_trainer.data.tokens import Tokenizer
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.setup.model import build_skeleton
from veomni_transformers.sequence import SequenceParallel, apply_context_parallel, apply_ulysses


@dataclass(frozen=True)
class Sharing:
    """The processes that share this one's sequences, and of them those that exchange heads with it.

    Without a ring (``cp_size`` of 1) these are the same, and ``heads`` is ``None``; so it is in a ring without Ulysses.
    """

    group: ProcessGroup
    heads: ProcessGroup | None
    train: TrainSection

    def apply(self, model: nn.Module) -> SequenceParallel:
        """Let the processes share the sequences of ``model``.

        Raises:
            ConfigError: they can't; the message has every reason.
        """
        overlap = self.train.sp_overlap
        if self.train.cp_size == 1:
            return apply_ulysses(model, self.group, overlap=overlap)
        return apply_context_parallel(model, self.group, sp_group=self.heads, overlap=overlap)


def sharing_of(train: TrainSection, arguments: TrainingArguments) -> Sharing | None:
    """The ``sp_size x cp_size`` neighbouring ranks that share this rank's sequences; ``None`` if it has its own.

    Raises:
        HostError: the number of processes is no multiple of that.
    """
    needed, world = train.ranks_per_sequence, arguments.world_size
    if needed == 1:
        return None
    if world % needed:
        keys = " x ".join(key for key in ("sp_size", "cp_size") if getattr(train, key) > 1)
        raise HostError(
            f"train.{keys} is {needed}, and this job has {world} process(es). Start a multiple of {needed}: "
            f"`torchrun --nproc_per_node={needed} -m veomni_core.cli train JOB.yaml`"
        )
    heads = _neighbours(train.sp_size, arguments) if needed > train.sp_size > 1 else None
    return Sharing(_neighbours(needed, arguments), heads, train)


def _neighbours(size: int, arguments: TrainingArguments) -> ProcessGroup:
    """The group of so many neighbouring ranks that this process is in."""
    sizes = (arguments.world_size // size, size)
    return init_device_mesh(arguments.device.type, sizes, mesh_dim_names=("dp", "sp"))["sp"].get_group()


def check_sequence_parallel(job: Job, ops: OpsConfig, tokenizer: Tokenizer, shared: Sharing) -> None:
    """Check, before weights are loaded, that the processes can share the sequences of the job's model.

    Applies sequence parallelism to the bound model on the meta device.

    Raises:
        ConfigError: the model doesn't support sequence parallelism; the message has every reason.
        VeOmniError: building the model would fail before its weights are loaded.
    """
    model = build_skeleton(job, ops, tokenizer)  # a local variable, since only a weak reference to it is kept
    shared.apply(model).undo()
