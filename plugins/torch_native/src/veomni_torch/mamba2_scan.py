"""Mamba 2's scan, chunk by chunk: within a chunk by matrix products, from chunk to chunk by a state.

Backward keeps the inputs and the state before each group of chunks. It computes one group at a time again, so that what
autograd keeps of the inside of chunks is as small as a group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.kernels import autocast_off, first_derivatives_only, without_autocast
from veomni_ops.contract import compute_dtype
from veomni_ops.mamba2_scan import check_call
from veomni_torch.scan_inside import CHUNK, scanned

# Numbers in the decays between all tokens of a group's chunks. An accelerator needs more of them, to be busy.
_CPU_GROUP, _ACCELERATOR_GROUP = 1 << 18, 1 << 24
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
    """
    check_call(x, dt, A, B, C, D, dt_bias, initial_states, dt_limit, seq_idx)
    wide = compute_dtype(x)
    with autocast_off(x.device.type):
        steps = dt.to(wide)
        if dt_bias is not None:
            steps = steps + dt_bias.to(wide)
        if dt_softplus:
            steps = F.softplus(steps)
        steps = steps.clamp(*dt_limit)
        decays = steps * A.to(wide)
    options = _Options(wide, return_final_states)
    return _Scan.apply(x, steps, decays, B, C, D, initial_states, seq_idx, options)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Options:
    """What a call says besides its tensors; ``dtype`` is that of all arithmetic."""

    dtype: torch.dtype
    keeps_final: bool


class _Scan(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        steps: Tensor,
        decays: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial: Tensor | None,
        seq_idx: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        batch, _, heads, width = x.shape
        shape = (batch, heads, width, B.shape[3])
        if initial is None:
            state = torch.zeros(shape, dtype=options.dtype, device=x.device)
        else:
            state = initial.to(options.dtype, copy=True)
        output = torch.empty(x.shape, dtype=options.dtype, device=x.device)
        numbers = None if seq_idx is None else _numbers(seq_idx)
        kept = []
        for tokens in _groups(x):
            kept.append(state)
            inputs = [each[:, tokens].to(options.dtype) for each in (x, steps, decays, B, C)]
            scale = None if D is None else D.to(options.dtype)
            output[:, tokens], state = scanned(inputs, scale, state, _of_group(numbers, tokens))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, steps, decays, B, C, D, numbers, *(kept if any(ctx.needs_input_grad) else ()))
        ctx.options, ctx.initial_dtype = options, None if initial is None else initial.dtype
        return output, state if options.keeps_final else None

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor | None, dfinal: Tensor | None = None) -> tuple[Any, ...]:
        x, steps, decays, B, C, D, numbers, *kept = ctx.saved_tensors
        if doutput is None and dfinal is None:
            return (None,) * 9
        wide = ctx.options.dtype
        along = (x, steps, decays, B, C)
        needed, needs_D = ctx.needs_input_grad[: len(along)], ctx.needs_input_grad[5]
        gradients = [
            torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in itertools.compress(along, needed)
        ]
        dscale = D.new_zeros(D.shape, dtype=wide) if needs_D else None
        dstate = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3], dtype=wide) if dfinal is None else dfinal
        for tokens, state in reversed(list(zip(_groups(x), kept, strict=True))):
            # Copies, even where nothing is cast: leaves must not be views of what autograd keeps.
            leaves = [
                each[:, tokens].to(wide, copy=True).requires_grad_(wanted)
                for each, wanted in zip(along, needed, strict=True)
            ]
            scale = None if D is None else D.to(wide, copy=True).requires_grad_(needs_D)
            before = state.detach().requires_grad_()
            with torch.enable_grad():
                output, after = scanned(leaves, scale, before, _of_group(numbers, tokens))
            upstream = torch.zeros_like(output) if doutput is None else doutput[:, tokens]
            sought = [before, *(each for each in (*leaves, scale) if each is not None and each.requires_grad)]
            dstate, *found = torch.autograd.grad((output, after), sought, (upstream, dstate))
            for into, gradient in zip(gradients, found, strict=False):  # D's comes after these
                into[:, tokens] = gradient
            if dscale is not None:
                dscale += found[-1]
        filled = iter(gradients)
        wanted_gradients = [next(filled) if wanted else None for wanted in needed]
        dD = None if dscale is None else dscale.to(D.dtype)
        dinitial = dstate.to(ctx.initial_dtype) if ctx.needs_input_grad[6] else None
        return *wanted_gradients, dD, dinitial, None, None


def _groups(x: Tensor) -> Iterator[slice]:
    """The tokens of neighbouring chunks that are computed together, as many as keep temporaries small."""
    budget = _CPU_GROUP if x.device.type == "cpu" else _ACCELERATOR_GROUP
    size = CHUNK * max(_FEWEST, budget // max(1, x.shape[0] * x.shape[2] * CHUNK * CHUNK))
    for first in range(0, x.shape[1], size):
        yield slice(first, min(first + size, x.shape[1]))


def _numbers(seq_idx: Tensor) -> Tensor:
    """How many sequences of its row end before each token ``[B, S]``."""
    changes = torch.zeros_like(seq_idx, dtype=torch.int32)
    changes[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return changes.cumsum(1, dtype=torch.int32)


def _of_group(numbers: Tensor | None, tokens: slice) -> Tensor | None:
    """The number of the token before the group, and those of its tokens ``[B, 1 + S]``."""
    if numbers is None:
        return None
    part = numbers[:, max(0, tokens.start - 1) : tokens.stop]
    return part if tokens.start else torch.cat([part[:, :1], part], dim=1)
