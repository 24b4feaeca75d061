"""Norms for the tests of ``veomni tune``: right ones whose cost a clock of the test reads, and ones that fail."""

from __future__ import annotations

import torch

from veomni_ops.rms_norm import standard

spent: list[float] = []
"""What each call of a kernel costs beyond the model's own code, in the milliseconds of :class:`CountingClock`."""


def cheap(x, weight, eps):
    spent.append(-4.0)
    return standard(x, weight, eps)


def costly(x, weight, eps):
    spent.append(20.0)
    return standard(x, weight, eps)


def out_of_memory(x, weight, eps):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def broken(x, weight, eps):
    raise RuntimeError("no such device function")


calls_left: list[int] = []
"""How many calls :func:`tiring` still computes."""


def tiring(x, weight, eps):
    if not calls_left:
        raise RuntimeError("it can't go on")
    calls_left.pop()
    return standard(x, weight, eps)


class CountingClock:
    """Takes five milliseconds for a call, and what the kernels in it say that they cost."""

    def milliseconds(self, call, calls):
        spent.clear()
        for _ in range(calls):
            call()
        return 5.0 * calls + sum(spent)
