"""The rotation as the operator ``veomni_triton::rotary_pos_emb``, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_ops.torch_operators import operator
from veomni_triton.rotary_pos_emb.form import Form
from veomni_triton.rotary_pos_emb.launch import rotate, rotate_launch


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, *form: bool) -> tuple[Tensor, Tensor]:
    launch = rotate_launch(q.shape[unsqueeze_dim], q.shape[3 - unsqueeze_dim], q.shape[3])
    return rotate(q, k, cos, sin, unsqueeze_dim, Form(*form), launch)


rotary_pos_emb = operator(
    "veomni_triton::rotary_pos_emb(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim,"
    " bool reads_neighbours, bool writes_neighbours, bool last, bool backwards) -> (Tensor q, Tensor k)",
    _rotated,
    lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
)
