"""Where the rows of a batch lie in memory, which a kernel must read from strides: shapes don't say it."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.contract import leaf

_FAR = 2**31 + 64  # elements between two rows, past what 32 bits address; aligned as strides mostly are
_COPIES = 7  # of a sample, that a check has in memory at once


def alone(x: Tensor) -> Tensor:
    """``x[1, ...]`` with a stride of its only row that follows from no shape, as a slice of a batch may have it.

    Args:
        x: a batch of one.

    Example:
        >>> x = torch.randn(1, 3, 5)
        >>> alone(x).stride(), torch.equal(alone(x), x)
        ((3, 5, 1), True)
    """
    return leaf(x.detach().as_strided(x.shape, (3, *x.stride()[1:]), x.storage_offset()))


def far_apart(x: Tensor) -> Tensor:
    """``x[2, ...]`` with its second row more than 2**31 elements behind the first: see :func:`has_room`.

    Args:
        x: a batch of two. What lies between its rows is zeros, or left as it is on a CPU.

    Example:
        >>> far_apart(torch.ones(2, 3, device="meta")).stride()
        (2147483712, 1)
    """
    row = x[0].numel()
    # A CPU gives no memory for pages that nothing writes.
    make = torch.empty if x.device.type == "cpu" else torch.zeros
    memory = make(_FAR + row, dtype=x.dtype, device=x.device)
    rows = memory.as_strided((2, row), (_FAR, 1)).unflatten(1, x.shape[1:])
    return leaf(rows.copy_(x.detach()))


def has_room(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has the memory to check a kernel on a sample with one tensor that is :func:`far_apart`.

    That is 32 GiB in 16 bits, 60 GiB in float32. CPUs are not expected to have it.

    Example:
        >>> has_room(torch.device("cpu"), torch.bfloat16)
        False
    """
    if device.type != "cuda":
        return False
    _, total = torch.cuda.mem_get_info(device)
    return bool(total > _COPIES * _FAR * dtype.itemsize + 2**32)
