"""What the job check of a subcommand says of its jobs, for ``veomni plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobConditions:
    """What a plan depends on besides a job's ``model`` section.

    Args:
        device: where the job runs, as torch names devices; ``None`` for the machine's accelerator.
        autocast: the dtype of the ``torch.autocast`` that it trains under; ``None`` for training without it.
        distributed_config: how transformers' engine will shard the model, as fields of its ``DistributedConfig``
            (``{"fsdp_size": 4, "ep_size": 2}``); ``None`` for a model that it doesn't shard.
        dtype: the dtype of the weights; ``None`` for the job's ``model.dtype``.
        ops_implementation: what is planned with in place of the job's section of that name; ``None`` for that section.
        batch: the sequences of a step on one device, and their length; ``None`` where steps differ in shape.
        vocabulary: the number of embeddings that the job's data give its model; ``None`` for what its config says.
        architecture: the class of the job's model, where it is another one than the config's, such as a classifier.
        needs_accelerator: whether the job names an accelerator, so that it doesn't run on a machine without one.
        adapt: puts the job's adapter into its model; ``None`` for a job without one.

    Example:
        >>> from veomni_core import Hardware
        >>> def check(path, hardware, changes=()):  # named by a CommandSpec's job_check, for a job in bfloat16
        ...     return JobConditions(autocast="bfloat16", dtype="float32")
        >>> check("job.yaml", Hardware.named("h200")).autocast
        'bfloat16'
    """

    device: str | None = None
    autocast: str | None = None
    distributed_config: Mapping[str, Any] | None = None
    dtype: str | None = None
    ops_implementation: Mapping[str, Any] | None = None
    batch: tuple[int, int] | None = None
    vocabulary: int | None = None
    architecture: str | None = None
    needs_accelerator: bool = False
    adapt: Callable[[Any], Any] | None = None
