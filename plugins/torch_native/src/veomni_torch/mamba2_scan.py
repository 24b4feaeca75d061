"""Mamba 2's scan, chunk by chunk: within a chunk by matrix products, from chunk to chunk by a state.

Backward keeps the inputs and the state before each group of chunks. It computes one group at a time again, so that what
autograd keeps of the inside of chunks is as small as a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import autocast_off
from veomni_ops.contract import compute_dtype
from veomni_ops.mamba2_scan import check_call
from veomni_torch.scan_groups import Groups, numbers_at_once, scanned_in_groups
from veomni_torch.scan_inside import CHUNK, scanned
from veomni_torch.traces import refuse_traces

_FEWEST = 4  # chunks of a group: with many heads, a state per chunk would take more than the inputs


def standard(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, math.inf),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output ``[B, S, H, P]`` and the final states ``[B, H, P, N]`` or ``None``, in float32.

    Everything between is in float32. Gradients of all floating-point tensors, from both results; autograd keeps the
    inputs, a few numbers per token and head, and a state per group of chunks.

    Raises:
        ValueError: shapes don't fit together.
        BindingError: ``torch.jit.trace`` records the call.
    """
    check_call(x, dt, A, B, C, D, dt_bias, initial_states, dt_limit, seq_idx)
    refuse_traces("mamba2_scan")
    wide = compute_dtype(x)
    with autocast_off(x.device.type):
        steps = dt.to(wide)
        if dt_bias is not None:
            steps = steps + dt_bias.to(wide)
        if dt_softplus:
            steps = F.softplus(steps)
        steps = steps.clamp(*dt_limit)
        decays = steps * A.to(wide)
    batch, _, heads, width = x.shape
    chunks = numbers_at_once(x.device) // max(1, batch * heads * CHUNK * CHUNK)
    groups = Groups(scanned, (batch, heads, width, B.shape[3]), CHUNK * max(_FEWEST, chunks), wide)
    output, state = scanned_in_groups(groups, (x, steps, decays, B, C), D, initial_states, seq_idx)
    return output, state if return_final_states else None
