"""What a job's precision means for its model, and whether this machine can compute in it."""

from __future__ import annotations

from transformers.utils.import_utils import is_torch_bf16_gpu_available

from veomni_core.errors import HostError
from veomni_trainer.job.precision import PRECISIONS, Precision, PrecisionName
from veomni_trainer.job.schema import Job


def precision_of(job: Job) -> Precision:
    """What the precision of a job that has one means."""
    assert job.train.precision is not None
    return PRECISIONS[job.train.precision]


def weights_dtype(job: Job) -> str:
    """The dtype in which the model's weights are loaded."""
    return job.model.dtype or precision_of(job).weights


def check_precision(precision: PrecisionName | None, on_cpu: bool) -> None:
    """Raise HostError if this machine can't compute in ``precision``."""
    if precision == "fp16_mixed" and on_cpu:
        raise HostError(
            "train.precision is fp16_mixed, but accelerate scales losses on accelerators only, and this job runs on "
            "the CPU. Write train.precision: bf16_mixed or float32"
        )
    if precision == "bf16_mixed" and not on_cpu and not is_torch_bf16_gpu_available():
        raise HostError(
            "train.precision is bf16_mixed, but this accelerator does not compute in bfloat16. Write "
            "fp16_mixed or float32"
        )
