"""The rotation as the operator ``veomni_triton::rotary_pos_emb_vision``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.torch_operators import operator
from veomni_triton.rotary_pos_emb_vision.launch import LAUNCH, rotate_patches


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, neighbours: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    return rotate_patches(q, k, cos, sin, neighbours, transposed, LAUNCH)


def _outputs(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(q, memory_format=contiguous), torch.empty_like(k, memory_format=contiguous)


rotary_pos_emb_vision = operator(
    "veomni_triton::rotary_pos_emb_vision(Tensor q, Tensor k, Tensor cos, Tensor sin, bool neighbours, bool transposed)"
    " -> (Tensor q, Tensor k)",
    _rotated,
    _outputs,
)
