"""Mamba 1's scan, a group of tokens at a time: what enters and decays of a group at once, then token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import autocast_off
from veomni_ops.contract import compute_dtype
from veomni_ops.selective_scan import check_call
from veomni_torch.scan_groups import Groups, numbers_at_once, scanned_in_groups
from veomni_torch.traces import refuse_traces

_FEWEST = 16  # tokens of a group: a state per group would take more than the inputs


def standard(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output ``[B, I, S]`` and the final states ``[B, I, N]`` or ``None``, in float32.

    Everything between is in float32. Gradients of all floating-point tensors, from both results; autograd keeps the
    inputs, a few numbers per token and channel, and a state per group of tokens.

    Raises:
        ValueError: shapes don't fit together.
        BindingError: ``torch.jit.trace`` records the call.
    """
    check_call(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    refuse_traces("selective_scan")
    wide, (batch, channels, _), state_width = compute_dtype(x), x.shape, A.shape[1]
    tokens = max(_FEWEST, numbers_at_once(x.device) // max(1, batch * channels * state_width))
    groups = Groups(_inside, (batch, channels, state_width), tokens, wide)
    with autocast_off(x.device.type):
        steps = dt.to(wide)
        if dt_bias is not None:
            steps = steps + dt_bias.to(wide)[:, None]
        if dt_softplus:
            steps = F.softplus(steps)
        scanned, final = scanned_in_groups(groups, (x.mT, steps.mT, B.mT, C.mT), A, initial_states, seq_idx)
        output = scanned.mT
        if D is not None:
            output = output + D.to(wide)[:, None] * x.to(wide)
        if z is not None:
            output = output * F.silu(z.to(wide))
    return output, final if return_final_states else None


def _inside(inputs: Sequence[Tensor], A: Tensor, state: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output ``[B, S, I]`` of some tokens, and the states after them."""
    x, steps, B, C = inputs
    decays = (steps[..., None] * A).exp()
    if numbers is not None:
        decays = decays.masked_fill((numbers.diff(dim=1) != 0)[..., None, None], 0.0)
    added = (steps * x)[..., None] * B[:, :, None]
    states = []
    for added_t, decay_t in zip(added.unbind(1), decays.unbind(1), strict=True):
        state = torch.addcmul(added_t, state, decay_t)
        states.append(state)
    return (torch.stack(states, dim=1) @ C[..., None])[..., 0], state
