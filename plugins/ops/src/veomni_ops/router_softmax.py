"""The dtype in which a router's softmax computes under autocast, for kernels that compute it themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.kernels import autocast_dtype


def as_softmax_takes(tensor: Tensor) -> Tensor:
    """Cast ``tensor`` to the dtype in which ``torch.softmax`` currently computes.

    Autocast runs softmax in float32 on CUDA, and in the input's dtype on the CPU. So this asks PyTorch, with a softmax
    of zero rows.

    Args:
        tensor: ``[..., C]``, of any floating dtype.

    Returns:
        ``tensor``, or a copy in the dtype of the softmax.

    Example:
        >>> logits = torch.randn(5, 8).bfloat16()
        >>> as_softmax_takes(logits) is logits  # without autocast
        True
    """
    if autocast_dtype(tensor.device.type) is None:
        return tensor
    return tensor.to(torch.softmax(tensor[:0], dim=-1).dtype)
