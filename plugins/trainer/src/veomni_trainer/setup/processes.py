"""The processes of a job: as many as its sizes need, in the groups that share sequences, which wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import distributed, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from veomni_core.errors import ConfigError, HostError
from veomni_trainer.job.train_section import TrainSection
from veomni_transformers.engine.layout import layout_for

if TYPE_CHECKING:  # their imports take seconds that `veomni plan` needn't spend
    from transformers import TrainingArguments

    from veomni_transformers.sequence import SequenceParallel


def distributed_config(train: TrainSection) -> dict[str, Any] | None:
    """The fields of transformers' ``DistributedConfig`` that the job sets; ``None`` if nothing is sharded."""
    if not train.is_sharded:
        return None
    sizes: dict[str, Any] = {name: getattr(train, name) for name in ("fsdp_size", "tp_size", "ep_size")}
    overrides = train.parallel_plan.model_dump() if train.parallel_plan else {}
    return sizes | {f"{kind}_plan": rules for kind, rules in overrides.items() if rules}


def check_started(train: TrainSection) -> None:
    """Raise HostError unless there are as many processes as the job's sizes need."""
    needed, here = train.fsdp_size * train.tp_size, int(os.environ.get("WORLD_SIZE", "1"))
    if here != needed:
        raise HostError(
            f"train.fsdp_size {train.fsdp_size} x tp_size {train.tp_size} need {needed} processes, and this job has "
            f"{here}. Start it as `torchrun --nproc_per_node={needed} -m veomni_core.cli train JOB.yaml`, or change "
            "the sizes"
        )


def check_sharding(train: TrainSection, model: PreTrainedModel) -> None:
    """Check that the job's sizes can shard ``model``, which may be on the meta device.

    Raises:
        ConfigError: they can't; the message has every reason.
        HostError: the installed transformers can't shard models, or there are more or fewer processes than needed.
    """
    if "WORLD_SIZE" in os.environ:  # `veomni plan` runs without torchrun, and knows nothing of the processes
        check_started(train)
    try:
        layout_for(model, distributed_config(train))
    except ConfigError as error:
        sizes = f"train.fsdp_size {train.fsdp_size}, tp_size {train.tp_size}, ep_size {train.ep_size}"
        raise ConfigError(f"{sizes}: {error}") from error


def sharing_of(train: TrainSection, arguments: TrainingArguments) -> Callable[[nn.Module], SequenceParallel] | None:
    """What lets the ``sp_size x cp_size`` neighbouring ranks share the sequences of a model; ``None`` if none do.

    It raises ConfigError where they can't; the message has every reason.

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
    from veomni_transformers.sequence import apply_context_parallel, apply_ulysses

    group = _neighbours(needed, arguments)
    if train.cp_size == 1:
        return partial(apply_ulysses, group=group, overlap=train.sp_overlap)
    heads = _neighbours(train.sp_size, arguments) if train.sp_size > 1 else None
    return partial(apply_context_parallel, group=group, sp_group=heads, overlap=train.sp_overlap)


def _neighbours(size: int, arguments: TrainingArguments) -> ProcessGroup:
    """The group of so many neighbouring ranks that this process is in."""
    sizes = (arguments.world_size // size, size)
    return init_device_mesh(arguments.device.type, sizes, mesh_dim_names=("dp", "sp"))["sp"].get_group()


def set_process_timeout(seconds: int) -> None:
    """Give every process group of this process the job's timeout.

    Groups of a device mesh, which transformers makes, get torch's default of 10 or 30 minutes, whatever the timeout of
    the first group. torch has no public way to change it.
    """
    if distributed.is_initialized() and distributed.get_backend() in ("gloo", "nccl"):
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
