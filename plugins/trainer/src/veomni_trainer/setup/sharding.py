"""Sharded jobs: their sizes as the core takes them, and what is refused before processes join or weights load."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedModel

from veomni_core.errors import ConfigError, HostError
from veomni_trainer.job.train_section import TrainSection
from veomni_transformers.engine.layout import layout_for


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
