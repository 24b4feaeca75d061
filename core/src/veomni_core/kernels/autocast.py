"""Does for kernels what ``torch.autocast`` does to the operands of PyTorch's own ops.

Under autocast, PyTorch's dispatcher casts the operands of a matrix product to one dtype before the product runs, and
leaves the inputs of elementwise code as they are. It has no rule for a kernel's custom operator. So a kernel with
matrix products casts its operands itself, with :func:`product_operands`. The casts are differentiable: gradients have
the operands' original dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

DTensor: Any = None
if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor

Call = Callable[..., Any]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast currently casts matrix products on ``device_type``; ``None`` if it is off there.

    For ``meta`` it counts as off, since PyTorch raises when asked. (``torch.amp.is_autocast_available`` would tell, but
    PyTorch 2.11 can't compile it.)

    Args:
        device_type: torch's name for the type, as ``"cuda"``.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     autocast_dtype("cpu")
        torch.bfloat16
        >>> autocast_dtype("cpu") is None
        True
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_as_autocast(tensor: Tensor) -> Tensor:
    """Cast ``tensor`` as autocast would for a matrix product: float64 and integers stay as they are.

    Args:
        tensor: of any shape and dtype.

    Returns:
        ``tensor`` in autocast's dtype; ``tensor`` itself without autocast.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     cast_as_autocast(torch.ones(2)).dtype, cast_as_autocast(torch.ones(2, dtype=torch.float64)).dtype
        (torch.bfloat16, torch.float64)
    """
    dtype = autocast_dtype(tensor.device.type)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def product_operands(
    kernel: str, *, dtypes: tuple[torch.dtype, ...] = (), **operands: Tensor | None
) -> tuple[Any, ...]:
    """Cast the operands of a kernel's matrix products with :func:`cast_as_autocast`, and check their dtypes.

    Args:
        kernel: the kernel's name, for messages.
        dtypes: the dtypes in which the kernel's products are right; empty for all. This stops a kernel that was planned
            for autocast in a forward that runs without it.
        operands: the operands by name; ``None`` stays ``None``.

    Returns:
        The operands, in order.

    Raises:
        TypeError: the operands differ in dtype (eager code would raise too, from its first product); their dtype is not
            in ``dtypes``; or one is a DTensor, as weights are that tensor parallelism has sharded after bind.

    Example:
        >>> hidden, weight = torch.ones(5, 8).bfloat16(), torch.ones(16, 8)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     hidden, bf16_weight, bias = product_operands("acme", hidden=hidden, weight=weight, bias=None)
        >>> bf16_weight.dtype, bias
        (torch.bfloat16, None)
        >>> product_operands("acme", hidden=hidden, weight=weight)
        Traceback (most recent call last):
            ...
        TypeError: acme multiplies tensors of one dtype, but hidden is bfloat16, weight is float32: cast them,
        or train under autocast
    """
    sharded = [name for name, tensor in operands.items() if DTensor is not None and isinstance(tensor, DTensor)]
    if sharded:
        raise TypeError(
            f"{kernel} takes plain tensors, but {' and '.join(sharded)} came as DTensors: kernels don't run on "
            "tensor-parallel weights yet; choose eager for this op"
        )
    cast = {name: None if tensor is None else cast_as_autocast(tensor) for name, tensor in operands.items()}
    present = {name: tensor.dtype for name, tensor in cast.items() if tensor is not None}
    if len(set(present.values())) > 1:
        found = ", ".join(f"{name} is {_name(dtype)}" for name, dtype in present.items())
        raise TypeError(f"{kernel} multiplies tensors of one dtype, but {found}: cast them, or train under autocast")
    if dtypes and not set(dtypes) >= set(present.values()):
        computed, found = (" or ".join(map(_name, some)) for some in (dtypes, dict.fromkeys(present.values())))
        raise TypeError(
            f"{kernel} computes {computed}, not {found}: run it under autocast, or with weights in bfloat16"
        )
    return tuple(cast.values())


def _name(dtype: torch.dtype) -> str:
    return f"{dtype}".removeprefix("torch.")


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """A context in which autocast is off for ``device_type``.

    Args:
        device_type: torch's name for the type, as ``"cuda"``.

    Example:
        >>> x, w = torch.ones(2, 3), torch.ones(3, 2)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     print((x @ w).dtype)
        ...     with autocast_off("cpu"):
        ...         print((x @ w).dtype)
        torch.bfloat16
        torch.float32
    """
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def without_autocast(function: Call) -> Call:
    """Decorates forward or backward of an ``autograd.Function`` to run with :func:`autocast_off`.

    Args:
        function: ``(ctx, *args)``. The first tensor among ``args`` says for which device type autocast goes off.

    Example:
        >>> class Product(torch.autograd.Function):
        ...     @staticmethod
        ...     @without_autocast
        ...     def forward(ctx, x, w):
        ...         return x @ w  # accumulated in float32, as the inputs are
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     Product.apply(torch.ones(2, 3), torch.ones(3, 2)).dtype
        torch.float32
    """

    @functools.wraps(function)
    def run(ctx: Any, *args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Tensor):
                with autocast_off(arg.device.type):
                    return function(ctx, *args)
        return function(ctx, *args)

    return run
