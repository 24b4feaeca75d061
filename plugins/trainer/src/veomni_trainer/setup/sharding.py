"""Sharded jobs: what transformers is told about the sizes, and what is refused before processes join or weights load.

transformers shards the model while it loads it (``from_pretrained(distributed_config=...)``), so no process ever holds
the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel

from veomni_core.errors import ConfigError, HostError
from veomni_trainer.job.schema import TrainSection

_OLDEST = Version("5.21")


def distributed_config(train: TrainSection) -> Any:
    """transformers' ``DistributedConfig`` of the job's sizes and plan overrides; ``None`` if nothing is sharded.

    Raises:
        HostError: the installed transformers can't shard models, or the processes are not as many as the sizes need.
    """
    if not train.is_sharded:
        return None
    installed = Version(transformers.__version__)
    if installed < _OLDEST:
        raise HostError(
            f"train.fsdp_size, tp_size and ep_size need transformers {_OLDEST} or later, and {installed} is installed. "
            "Upgrade it, or write train.fsdp: true to shard by accelerate"
        )
    if "WORLD_SIZE" in os.environ:  # `veomni plan` runs without torchrun, and knows nothing of the processes
        check_started(train)
    from transformers.distributed import DistributedConfig

    plan = train.parallel_plan
    overrides = {f"{kind}_plan": rules for kind, rules in (plan.model_dump() if plan else {}).items() if rules}
    return DistributedConfig(
        fsdp_size=train.fsdp_size, tp_size=train.tp_size, ep_size=train.ep_size, pp_size=1, **overrides
    )


def check_sharding(train: TrainSection, model: PreTrainedModel) -> None:
    """Check that the job's sizes can shard ``model``, which may be on the meta device.

    Raises:
        ConfigError: they can't; the message has every reason.
        HostError: as :func:`distributed_config`.
    """
    config = distributed_config(train)
    if config is None:
        return
    try:
        tp_plan, ep_plan, _ = model._resolve_parallel_plans(config)
    except ValueError as error:
        raise ConfigError(f"{_sizes(train)} can't shard {type(model).__name__}: {error}") from None
    problems = [*_undivided_heads(model, tp_plan, train.tp_size), *_undivided_experts(model, ep_plan, train.ep_size)]
    if problems:
        raise ConfigError(f"{_sizes(train)} can't shard {type(model).__name__}: {'; '.join(dict.fromkeys(problems))}")


def _sizes(train: TrainSection) -> str:
    return f"train.fsdp_size {train.fsdp_size}, tp_size {train.tp_size}, ep_size {train.ep_size}"


def check_started(train: TrainSection) -> None:
    """Raise HostError unless there are as many processes as the job's sizes need."""
    if train.is_sharded:
        _check_processes(train, int(os.environ.get("WORLD_SIZE", "1")))


def _check_processes(train: TrainSection, here: int) -> None:
    needed = train.fsdp_size * train.tp_size
    if here != needed:
        raise HostError(
            f"train.fsdp_size {train.fsdp_size} x tp_size {train.tp_size} need {needed} processes, and this job has "
            f"{here}. Start it as `torchrun --nproc_per_node={needed} -m veomni_core.cli train JOB.yaml`, or change "
            "the sizes"
        )


def _undivided_heads(model: PreTrainedModel, plan: dict[str, str], tp_size: int) -> Iterator[str]:
    """Attention splits what a column-parallel projection gives into heads, so each rank must get whole ones."""
    modules = dict(model.named_modules())
    key_heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    for path, style in plan.items():
        parent, _, name = path.rpartition(".")
        width = getattr(modules.get(parent), "head_dim", None)
        module = modules.get(path)
        if style != "colwise" or not width or not isinstance(module, nn.Linear):
            continue
        heads = module.out_features // width
        if heads % tp_size:
            key = "num_key_value_heads" if name[0] in "kv" and heads == key_heads else "num_attention_heads"
            yield f"train.tp_size: {tp_size} does not divide the model's {key}, {heads}"


def _undivided_experts(model: nn.Module, plan: dict[str, str], ep_size: int) -> Iterator[str]:
    parameters = dict(model.named_parameters())
    for path, style in plan.items():
        if style == "grouped_gemm" and path in parameters and (experts := parameters[path].shape[0]) % ep_size:
            yield f"train.ep_size: {ep_size} does not divide the model's {experts} experts"
