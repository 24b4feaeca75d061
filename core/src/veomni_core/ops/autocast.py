"""What ``torch.autocast`` does to the operands of an eager op, for kernels that it doesn't know.

Under autocast, PyTorch's dispatcher casts the operands of a matrix product to one dtype before the product runs, and
leaves the inputs of elementwise code as they are. A kernel's operator is nothing that it knows, so a kernel with matrix
products casts by :func:`product_operands`. Casts are differentiable: gradients come back in the operands' own dtypes.
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
    """The dtype in which matrix products run on such devices here; ``None`` where autocast is off for them.

    It is always off for ``meta``, of which PyTorch can't be asked. (``torch.amp.is_autocast_available`` would tell, but
    PyTorch 2.11 can't compile it.)
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_as_autocast(tensor: Tensor) -> Tensor:
    """``tensor`` as a matrix product here would take it. As autocast does, float64 and integers are left alone."""
    dtype = autocast_dtype(tensor.device.type)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def product_operands(
    kernel: str, *, dtypes: tuple[torch.dtype, ...] = (), **operands: Tensor | None
) -> tuple[Any, ...]:
    """The operands of ``kernel``'s matrix products, in order, each as :func:`cast_as_autocast` gives it, or ``None``.

    ``dtypes`` are those in which the products are right, where that is not so in all. A kernel that was planned for
    autocast is stopped by them in a forward outside of it.

    Raises:
        TypeError: they differ in dtype. Eager code raises there too, but from within its first product. Or they are in
            none of ``dtypes``, or one is a DTensor, as a weight is that tensor parallel sharded after the kernel was
            bound.
    """
    sharded = [name for name, tensor in operands.items() if _is_dtensor(tensor)]
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


def _is_dtensor(tensor: Tensor | None) -> bool:
    return DTensor is not None and isinstance(tensor, DTensor)


def as_softmax_takes(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype in which ``torch.softmax`` of it is computed and given here.

    Autocast takes softmax in float32 on CUDA, and in its input's dtype on the CPU; so PyTorch is asked, with no rows.
    """
    if autocast_dtype(tensor.device.type) is None:
        return tensor
    return tensor.to(torch.softmax(tensor[:0], dim=-1).dtype)


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """A context in which matrix products on such devices run in their operands' own dtypes."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def without_autocast(function: Call) -> Call:
    """Decorates forward or backward of an ``autograd.Function``, which then runs in :func:`autocast_off`."""

    @functools.wraps(function)
    def run(ctx: Any, *args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Tensor):
                with autocast_off(arg.device.type):
                    return function(ctx, *args)
        return function(ctx, *args)

    return run
