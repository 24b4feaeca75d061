"""What delta rules share: the recurrence over tokens, and which calls fit together.

The decay has one number per token and head, or one per key channel. Shape suffixes: ``B`` batch, ``S`` sequence, ``H``
heads, ``HV`` value heads, ``K`` key width, ``V`` value width, ``N`` sequences.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from veomni_ops.contract import compute_dtype

NORM_EPS = 1e-6  # added to the sum of squares of a query or key that is normalised
Bounds = tuple[tuple[int, int], ...]


def over_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    is_normed: bool,
    bounds: Bounds | None,
) -> tuple[Tensor, Tensor]:
    """The output ``[B, S, HV, V]`` in query's dtype, and the final states ``[N, HV, K, V]``, one token at a time.

    Args:
        query: and the others: as the ops have them, except ``g``, which is ``[B, S, HV, 1]`` or ``[B, S, HV, K]``.
        is_normed: whether queries and keys are normalised.
        bounds: as :func:`check_inputs` gives it.

    Example:
        >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1, 1), 0.5)
        >>> output, state = over_tokens(one, one, one, half.log(), half[..., 0], 1.0, None, False, None)
        >>> output.flatten(), state.flatten()
        (tensor([0.5000, 0.6250]), tensor([0.6250]))
    """
    wide = compute_dtype(query)
    repeats = value.shape[2] // max(1, query.shape[2])
    q, k, v, decay, rate = (x.to(wide) for x in (query, key, value, g, beta))
    decay = decay.exp()
    if is_normed:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q = q * (query.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    batch, length, heads, width = value.shape
    rows = batch * heads
    # Of each token: k [B*HV, K, 1], beta * k [B*HV, 1, K], beta * v [B*HV, 1, V], decay [B*HV, 1 or K, 1]. Unbound at
    # once, since the gradient of one token that is selected by its index has the size of the whole sequence.
    parts = (k[..., None], (rate[..., None] * k)[..., None, :], (rate[..., None] * v)[..., None, :], decay[..., None])
    by_token = (part.transpose(0, 1).reshape(length, rows, *part.shape[3:]) for part in parts)
    tokens = [*zip(*(part.unbind() for part in by_token), strict=True)]
    states, finals = [], []
    for index, (first, last) in enumerate(bounds or ((0, length),)):
        if initial_state is None:
            state = torch.zeros(rows, key.shape[3], width, dtype=wide, device=query.device)
        else:
            given = initial_state if bounds is None else initial_state[index]
            state = given.to(wide).reshape(rows, key.shape[3], width)
        for k_t, read_t, written_t, decay_t in tokens[first:last]:
            state = state * decay_t
            state = torch.baddbmm(state, k_t, torch.baddbmm(written_t, read_t, state, alpha=-1))
            states.append(state)
        finals.append(state.reshape(batch, heads, key.shape[3], width))
    if not states:
        return torch.zeros_like(value, dtype=query.dtype), torch.cat(finals)
    # [S, B*HV, 1, K] times the states [S, B*HV, K, V], of all tokens at once
    output = q.transpose(0, 1).reshape(length, rows, 1, -1) @ torch.stack(states)
    output = output.reshape(length, batch, heads, width).transpose(0, 1)
    return output.to(query.dtype), torch.cat(finals)


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    per_channel: bool = False,
) -> Bounds | None:
    """Check that the inputs of a call fit together. A kernel calls it first, as its op's ``check_call``.

    The boundaries are read, which waits for the device that has them.

    Args:
        query: and the others: as the ops have them.
        per_channel: whether ``g`` has a number per key channel, or one for all of them.

    Returns:
        The first token of each packed sequence, and the one after its last; ``None`` where nothing is packed.

    Raises:
        ValueError: a shape doesn't fit to the others; a state is of another number of sequences; the boundaries are not
            those of a batch of one, don't go from 0 to its length, or go back.

    Example:
        >>> q, v, gate = torch.zeros(1, 7, 2, 8), torch.zeros(1, 7, 2, 16), torch.zeros(1, 7, 2)
        >>> check_inputs(q, q, v, gate, gate, cu_seqlens=torch.tensor([0, 3, 7]))
        ((0, 3), (3, 7))
        >>> check_inputs(q, q, v, gate, gate, cu_seqlens=torch.tensor([0, 3, 6]))
        Traceback (most recent call last):
            ...
        ValueError: cu_seqlens goes from 0 to 6, expected from 0 to 7, the length of the packed sequences
        >>> check_inputs(q, q, v, gate, gate, per_channel=True)
        Traceback (most recent call last):
            ...
        ValueError: g is (1, 7, 2), expected (1, 7, 2, 8): one number per token, head and key channel
    """
    if query.dim() != 4 or key.shape != query.shape or value.dim() != 4 or value.shape[:2] != query.shape[:2]:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        raise ValueError(f"query, key and value are {shapes}, expected [B, S, H, K] twice and [B, S, HV, V]")
    batch, length, heads, width = query.shape
    if not heads or value.shape[2] % heads:
        raise ValueError(f"value has {value.shape[2]} heads, expected a multiple of the {heads} of query and key")
    per_head = tuple(value.shape[:3])
    decays = ((*per_head, width), "token, head and key channel") if per_channel else (per_head, "token and head")
    for name, gate, (expected, numbers) in (("g", g, decays), ("beta", beta, (per_head, "token and head"))):
        if gate.shape != expected:
            raise ValueError(f"{name} is {tuple(gate.shape)}, expected {expected}: one number per {numbers}")
    bounds = None if cu_seqlens is None else _bounds(cu_seqlens, batch, length)
    if initial_state is not None:
        wanted = (batch if bounds is None else len(bounds), value.shape[2], width, value.shape[3])
        if tuple(initial_state.shape) != wanted:
            raise ValueError(
                f"initial_state is {tuple(initial_state.shape)}, expected {wanted}: one state per sequence"
            )
    return bounds


def _bounds(cu_seqlens: Tensor, batch: int, length: int) -> Bounds:
    if batch != 1:
        raise ValueError(f"cu_seqlens came with a batch of {batch}: packed sequences are a batch of one")
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected integers [N + 1]")
    ends = cu_seqlens.tolist()
    if (ends[0], ends[-1]) != (0, length):
        raise ValueError(
            f"cu_seqlens goes from {ends[0]} to {ends[-1]}, expected from 0 to {length}, the length of the packed "
            "sequences"
        )
    bounds = tuple(pairwise(ends))
    if back := next((pair for pair in bounds if pair[1] < pair[0]), None):
        raise ValueError(f"cu_seqlens goes back from {back[0]} to {back[1]}")
    return bounds
