"""The processes that measure together, one for each GPU. Without GPUs they run on CPUs over gloo: for trying a script.

Every rank calls these functions in the same order: they are collectives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed

from benchmarks.shared.measuring import Call, seconds_in_turns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_PATIENCE = timedelta(minutes=4)  # ranks compile side by side, and one may take longer than the other


@contextmanager
def process_group() -> Iterator[None]:
    """All processes of the launch by ``torchrun``, each on its own GPU."""
    if DEVICE == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device, timeout=_PATIENCE)
    else:
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    yield
    distributed.barrier()
    distributed.destroy_process_group()


def is_first() -> bool:
    return distributed.get_rank() == 0


def say(text: str) -> None:
    """Print on the first rank."""
    if is_first():
        print(text, flush=True)


def wait_for_device() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _start_together() -> None:
    wait_for_device()
    distributed.barrier()


def slowest_milliseconds(calls: Mapping[str, Call], repeats: int, warm_ups: int) -> dict[str, list[float]]:
    """The time of each call on the slowest rank. The calls take turns, and the ranks start each one together."""
    times = seconds_in_turns(calls, repeats, warm_ups, before=_start_together, wait=wait_for_device)
    return {name: [1e3 * time for time in _largest(mine)] for name, mine in times.items()}


def reset_peak() -> None:
    """Start :func:`peak_gb` anew."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float:
    """The most that the allocator held at once, on the rank that held most; 0 on CPUs."""
    return _largest([torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0])[0]


def held_gb() -> float:
    """What the allocator holds now, likewise."""
    return _largest([torch.cuda.memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0])[0]


def total(value: Tensor) -> float:
    """The sum over ranks."""
    summed = value.detach().to(DEVICE, torch.float64).clone()
    distributed.all_reduce(summed)
    return float(summed)


def problems(mine: str) -> list[str]:
    """What went wrong on any rank, each once."""
    everyone: list[str] = [""] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return sorted({each for each in everyone if each})


def _largest(values: list[float]) -> list[float]:
    largest = torch.tensor(values, device=DEVICE, dtype=torch.float64)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    found: list[float] = largest.tolist()
    return found
