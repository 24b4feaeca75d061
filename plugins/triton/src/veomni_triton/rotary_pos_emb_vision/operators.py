"""The rotation as the operator ``veomni_triton::rotary_pos_emb_vision``, without autograd.

``torch.compile`` doesn't trace into an operator. It is defined through a ``Library`` rather than by ``custom_op``,
which puts more Python around each call.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from veomni_triton.rotary_pos_emb_vision.launch import LAUNCH, rotate_patches

_LIBRARY = library.Library("veomni_triton", "FRAGMENT")
_LIBRARY.define(
    "rotary_pos_emb_vision(Tensor q, Tensor k, Tensor cos, Tensor sin, bool neighbours, bool transposed)"
    " -> (Tensor q, Tensor k)"
)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, neighbours: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    return rotate_patches(q, k, cos, sin, neighbours, transposed, LAUNCH)


def _outputs(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(q, memory_format=contiguous), torch.empty_like(k, memory_format=contiguous)


_LIBRARY.impl("rotary_pos_emb_vision", _rotated, "CompositeExplicitAutograd")
library.register_fake("veomni_triton::rotary_pos_emb_vision", _outputs, lib=_LIBRARY)
rotary_pos_emb_vision = torch.ops.veomni_triton.rotary_pos_emb_vision.default
