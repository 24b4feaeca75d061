"""What a job leaves to the machine: its precision and its optimizer."""

from __future__ import annotations

from veomni_core import Hardware, Registry
from veomni_trainer.job.precision import PrecisionName
from veomni_trainer.job.schema import Job
from veomni_trainer.setup.model import ops_config

_FIRST_WITH_BFLOAT16 = 80  # NVIDIA's compute capability; older GPUs only emulate it
_WITH_FUSED_ADAMW = ("cpu", "cuda", "rocm")


def with_machine_defaults(job: Job, hardware: Hardware) -> Job:
    """``job`` with the keys filled in whose defaults depend on ``hardware``."""
    defaults = {"precision": default_precision(hardware), "optimizer": default_optimizer(hardware)}
    missing = {key: value for key, value in defaults.items() if getattr(job.train, key) is None}
    return job.model_copy(update={"train": job.train.model_copy(update=missing)})


def for_this_machine(job: Job, registry: Registry | None = None) -> Job:
    """``job`` with the defaults of the machine that it trains on; plugins are discovered without ``registry``.

    Raises:
        ConfigError: the job's kernels can't be read.
    """
    hardware = ops_config(job, registry).registry.detect_hardware("cpu" if job.train.device == "cpu" else None)
    return with_machine_defaults(job, hardware)


def default_precision(hardware: Hardware) -> PrecisionName:
    """``bf16_mixed`` on an accelerator that computes in bfloat16, otherwise ``float32``."""
    capability = hardware.compute_capability
    has_bfloat16 = hardware.device_type != "cpu" and (capability is None or capability >= _FIRST_WITH_BFLOAT16)
    return "bf16_mixed" if has_bfloat16 else "float32"


def default_optimizer(hardware: Hardware) -> str:
    """AdamW, fused on devices for which torch has that."""
    return "adamw_torch_fused" if hardware.device_type in _WITH_FUSED_ADAMW else "adamw_torch"
