"""Turns what torch and Python raise where the machine fails, not the job, into errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from veomni_core.errors import HostError
from veomni_transformers.jobs.job_files import first_line

_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # torch's RuntimeError of a CPU


@contextmanager
def naming_lack_of_memory(two_runs: bool) -> Iterator[None]:
    """Name the keys that lower the memory; ``two_runs``: whether two runs share it.

    Raises:
        HostError: the memory of the device, or of the machine, isn't enough.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_cpu = isinstance(error, MemoryError) or any(sign in str(error) for sign in _MEMORY)
        if not on_cpu and not isinstance(error, torch.OutOfMemoryError):
            raise
        shared = (
            "Two runs share the memory: --compare eager-after trains one after the other. Or l" if two_runs else "L"
        )
        raise HostError(
            f"out of memory: {first_line(error).rstrip('.')}. {shared}ower train.batch_size or data.sequence_length "
            "(and raise train.gradient_accumulation to keep the batch), or set train.gradient_checkpointing: true"
        ) from error


@contextmanager
def naming_lost_processes(seconds: int) -> Iterator[None]:
    """Turn torch's errors about a process that is gone into one that names the cause.

    Raises:
        HostError: another process ended, or did not answer for ``seconds``.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or any(sign in str(error) for sign in _LOST)):
            raise
        raise HostError(
            f"another process of this job ended, or did not answer for {seconds} s (train.timeout): what the first one "
            f"printed says why. Continue from the last checkpoint with --resume. Here torch says: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
