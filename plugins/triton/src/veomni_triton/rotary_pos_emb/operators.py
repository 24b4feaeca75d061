"""The rotation as the operator ``veomni_triton::rotary_pos_emb``, without autograd.

``torch.compile`` doesn't trace into an operator. It is defined through a ``Library`` rather than by ``custom_op``,
which puts more Python around each call.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from veomni_triton.rotary_pos_emb.form import Form
from veomni_triton.rotary_pos_emb.launch import rotate, rotate_launch

_LIBRARY = library.Library("veomni_triton", "FRAGMENT")
_LIBRARY.define(
    "rotary_pos_emb(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim, bool reads_neighbours,"
    " bool writes_neighbours, bool last, bool backwards) -> (Tensor q, Tensor k)"
)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, *form: bool) -> tuple[Tensor, Tensor]:
    launch = rotate_launch(q.shape[unsqueeze_dim], q.shape[3 - unsqueeze_dim], q.shape[3])
    return rotate(q, k, cos, sin, unsqueeze_dim, Form(*form), launch)


def _outputs(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


_LIBRARY.impl("rotary_pos_emb", _rotated, "CompositeExplicitAutograd")
library.register_fake("veomni_triton::rotary_pos_emb", _outputs, lib=_LIBRARY)
rotary_pos_emb = torch.ops.veomni_triton.rotary_pos_emb.default
