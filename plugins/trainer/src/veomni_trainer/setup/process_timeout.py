"""How long the processes of a job wait for each other, and the error when one of them is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import distributed
from torch.distributed import distributed_c10d

from veomni_core.errors import HostError

_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


def set_process_timeout(seconds: int) -> None:
    """Give every process group of this process the job's timeout.

    Groups of a device mesh, which transformers makes, get torch's default of 10 or 30 minutes, whatever the timeout of
    the first group. torch has no public way to change it.
    """
    if distributed.is_initialized() and distributed.get_backend() in ("gloo", "nccl"):
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def naming_lost_processes(seconds: int) -> Iterator[None]:
    """Turn torch's errors about a process that is gone into one that names the cause.

    Raises:
        HostError: another process ended, or did not answer for ``seconds``.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or any(sign in str(error) for sign in _SIGNS)):
            raise
        raise HostError(
            f"another process of this job ended, or did not answer for {seconds} s (train.timeout): what the first one "
            f"printed says why. Continue from the last checkpoint with --resume. Here torch says: {_short(error)}"
        ) from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
