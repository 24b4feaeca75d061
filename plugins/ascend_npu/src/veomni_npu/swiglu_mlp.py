"""swiglu_mlp by ``npu_swiglu``, which takes gate and up as the halves of one tensor, gate first.

If a model computes gate and up by two linears, they are copied into that layout. Only the copy is saved for backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_npu.operators import npu


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; shapes ``[..., I]``, of 1 to 8 dimensions."""
    return npu.npu_swiglu(torch.cat((gate, up), dim=-1), -1)
