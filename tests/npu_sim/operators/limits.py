"""Limits that several operators share. A call beyond one raises ``RuntimeError``, as torch_npu's own checks do."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def require(condition: bool, message: str) -> None:
    """Raise ``RuntimeError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise RuntimeError(message)


def require_dtype(operator: str, name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise unless the dtype of argument ``name`` is one of ``allowed``."""
    listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    require(tensor.dtype in allowed, f"{operator}: {name} supports {listed}, but got {tensor.dtype}")


def require_same_dtype(operator: str, **tensors: Tensor) -> None:
    """Raise unless all arguments have one dtype."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    require(len(set(dtypes.values())) == 1, f"{operator}: dtypes must be equal, but got {dtypes}")


def require_dims(operator: str, name: str, tensor: Tensor, allowed: tuple[int, ...]) -> None:
    """Raise unless argument ``name`` has one of the ``allowed`` numbers of dimensions."""
    require(tensor.dim() in allowed, f"{operator}: {name} must have {allowed} dimensions, but got {tensor.dim()}")
