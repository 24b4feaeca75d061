"""What a job's plan depends on besides its model: kernels, device, precision and sizes, as this machine has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veomni_core import Hardware, JobConditions, OpsConfig, Registry
from veomni_trainer.job.precision import PRECISIONS, Precision
from veomni_trainer.job.schema import Job
from veomni_trainer.setup.processes import distributed_config

_FIRST_WITH_BFLOAT16 = 80  # NVIDIA's compute capability; older GPUs only emulate it
_WITH_FUSED_ADAMW = ("cpu", "cuda", "rocm")


def with_machine_defaults(job: Job, hardware: Hardware) -> Job:
    """``job`` with the keys filled in whose defaults depend on ``hardware``."""
    capability = hardware.compute_capability
    has_bfloat16 = hardware.device_type != "cpu" and (capability is None or capability >= _FIRST_WITH_BFLOAT16)
    defaults = {
        "precision": "bf16_mixed" if has_bfloat16 else "float32",
        "optimizer": "adamw_torch_fused" if hardware.device_type in _WITH_FUSED_ADAMW else "adamw_torch",
    }
    missing = {key: value for key, value in defaults.items() if getattr(job.train, key) is None}
    return job.model_copy(update={"train": job.train.model_copy(update=missing)})


def for_this_machine(job: Job, registry: Registry | None = None) -> Job:
    """``job`` with the defaults of the machine that it trains on; plugins are discovered without ``registry``.

    Raises:
        ConfigError: the job's kernels can't be read.
    """
    hardware = ops_config(job, registry).registry.detect_hardware("cpu" if job.train.device == "cpu" else None)
    return with_machine_defaults(job, hardware)


def ops_implementation(job: Job) -> Any:
    """The section of that name. A method of TRL's computes its loss itself, from log-probabilities.

    Raises:
        ConfigError: the job names a kernel for a loss that would never run.
    """
    written = job.model.ops_implementation
    if not job.train.uses_trl or not isinstance(written, Mapping):
        return written
    from veomni_bridges.losses import with_eager_losses, with_log_probabilities

    eager = with_eager_losses(written, f"TRL's trainers (train.method: {job.train.method})")
    return with_log_probabilities(eager) if job.train.takes_logprobs else eager


def ops_config(job: Job, registry: Registry | None = None) -> OpsConfig:
    """The kernels that the job chooses, of the plugins in ``registry``; they are discovered without it.

    Raises:
        ConfigError: the job chooses none, or names a field, value or preset that doesn't exist.
    """
    return OpsConfig.from_dict({"model": {"ops_implementation": ops_implementation(job)}}, registry)


def conditions(job: Job) -> JobConditions:
    """The conditions, besides the model, that the job's plan depends on: device, precision and sizes."""
    return JobConditions(
        device="cpu" if job.train.device == "cpu" else None,
        autocast=precision_of(job).autocast,
        dtype=weights_dtype(job),
        distributed_config=distributed_config(job.train),
        ops_implementation=ops_implementation(job) if job.train.uses_trl else None,
        batch=_batch(job),
        needs_accelerator=job.train.device == "cuda",
    )


def _batch(job: Job) -> tuple[int, int] | None:
    """The shape of a step on one device; ``None`` where ``veomni tune`` doesn't measure such steps.

    Packed sequences, TRL's rows and sequences that processes share have other shapes, and adapters other gradients.
    """
    train = job.train
    shared = train.ranks_per_sequence > 1 or train.is_sharded or train.fsdp
    if job.data.packing or job.lora or train.method != "pretrain" or shared:
        return None
    return train.batch_size, job.data.sequence_length


def precision_of(job: Job) -> Precision:
    """What the precision of a job that has one means."""
    assert job.train.precision is not None
    return PRECISIONS[job.train.precision]


def weights_dtype(job: Job) -> str:
    """The dtype in which the model's weights are loaded."""
    return job.model.dtype or precision_of(job).weights
