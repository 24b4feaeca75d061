"""chunk_gated_delta_rule: linear attention whose state forgets by a gate and is corrected by the delta rule.

The call is that of flash-linear-attention's function of this name, as transformers' models make it. A site's ``sizes``:
``key_heads``, ``value_heads``, ``key_width`` and ``value_width``, where the model states them. Tokens that are decoded
one at a time go through the model's own recurrent function, which is not this op.

Shape suffixes: ``B`` batch, ``S`` sequence, ``H`` heads, ``K`` key width, ``V`` value width, ``N`` sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from veomni_core.ops.contract import Contract, Draw, Sample, Tolerance, as_tensors, compute_dtype, leaf

NORM_EPS = 1e-6  # added to the sum of squares of a query or key that is normalised


def standard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Reads and corrects a state ``S[K, V]`` of each head, token by token, in float32.

    For token ``t``, with ``S' = exp(g[t]) * S``, the new state is
    ``S = S' + key[t] (x) (beta[t] * (value[t] - key[t] @ S'))``, and the output is ``scale * query[t] @ S``.

    Args:
        query: ``[B, S, H, K]``. Its heads may divide the value's: each then serves that many neighbouring value heads.
        key: of the query's shape.
        value: ``[B, S, HV, V]``.
        g: the logarithm of the decay ``[B, S, HV]``, at most 0, mostly in float32.
        beta: how much of the correction is written ``[B, S, HV]``.
        scale: multiplies the query; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, the state before the first token of each sequence; zeros by default.
        output_final_state: whether the state after the last token of each sequence is returned.
        use_qk_l2norm_in_kernel: whether queries and keys are divided by ``sqrt(sum of squares + 1e-6)`` first.
        cu_seqlens: integers ``[N + 1]`` from 0 to S, where packed sequences begin and end in a batch of one. Sequences
            may be empty. Without it, N is B.

    Returns:
        The output ``[B, S, HV, V]`` in query's dtype, and the final states ``[N, HV, K, V]`` in float32, or ``None``
        (both in float64 for float64 queries). Gradients of all floating-point inputs, from both.

    Raises:
        ValueError: shapes or boundaries don't fit together (:func:`check_call`).

    Example:
        >>> one = torch.ones(1, 2, 1, 1)  # two tokens with the same key of width 1
        >>> half = torch.full((1, 2, 1), 0.5)
        >>> output, state = standard(one, one, one, g=half.log(), beta=half, scale=1.0, output_final_state=True)
        >>> output.flatten(), state.flatten()  # 0 + (1 - 0)/2, and then 1/4 + (1 - 1/4)/2
        (tensor([0.5000, 0.6250]), tensor([0.6250]))
    """
    bounds = check_call(query, key, value, g, beta, initial_state, cu_seqlens)
    wide = compute_dtype(query)
    repeats = value.shape[2] // max(1, query.shape[2])
    q, k, v, decay, rate = (x.to(wide) for x in (query, key, value, g, beta))
    decay = decay.exp()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q = q * (query.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    shape = (value.shape[2], key.shape[3], value.shape[3])
    outputs, finals = [], []
    for index, (first, last) in enumerate(bounds or ((0, query.shape[1]),)):
        rows = slice(None) if bounds is None else slice(index, index + 1)
        if initial_state is None:
            state = torch.zeros(query.shape[0], *shape, dtype=wide, device=query.device)
        else:
            state = initial_state[rows].to(wide)
        for t in range(first, last):
            state = state * decay[:, t, :, None, None]
            read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            correction = rate[:, t, :, None] * (v[:, t] - read)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], correction)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        finals.append(state)
    output = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return output.to(query.dtype), torch.cat(finals) if output_final_state else None


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[tuple[int, int], ...] | None:
    """Check that the inputs of a call fit together. A kernel calls it first.

    The boundaries are read, which waits for the device that has them.

    Returns:
        The first token of each packed sequence, and the one after its last; ``None`` where nothing is packed.

    Raises:
        ValueError: a shape doesn't fit to the others; a state is of another number of sequences; the boundaries are not
            those of a batch of one, don't go from 0 to its length, or go back.

    Example:
        >>> q, v, g = torch.zeros(1, 7, 2, 8), torch.zeros(1, 7, 4, 16), torch.zeros(1, 7, 4)
        >>> check_call(q, q, v, g, g, cu_seqlens=torch.tensor([0, 3, 7]))
        ((0, 3), (3, 7))
        >>> check_call(q, q, v, g, g, cu_seqlens=torch.tensor([0, 3, 6]))
        Traceback (most recent call last):
            ...
        ValueError: cu_seqlens goes from 0 to 6, expected from 0 to 7, the length of the packed sequences
    """
    if query.dim() != 4 or key.shape != query.shape or value.dim() != 4 or value.shape[:2] != query.shape[:2]:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        raise ValueError(f"query, key and value are {shapes}, expected [B, S, H, K] twice and [B, S, HV, V]")
    batch, length, heads, width = query.shape
    if not heads or value.shape[2] % heads:
        raise ValueError(f"value has {value.shape[2]} heads, expected a multiple of the {heads} of query and key")
    for name, gate in (("g", g), ("beta", beta)):
        if gate.shape != value.shape[:3]:
            raise ValueError(
                f"{name} is {tuple(gate.shape)}, expected {tuple(value.shape[:3])}: one number per token and head"
            )
    bounds = None if cu_seqlens is None else _bounds(cu_seqlens, batch, length)
    if initial_state is not None:
        wanted = (batch if bounds is None else len(bounds), value.shape[2], width, value.shape[3])
        if tuple(initial_state.shape) != wanted:
            raise ValueError(
                f"initial_state is {tuple(initial_state.shape)}, expected {wanted}: one state per sequence"
            )
    return bounds


def _bounds(cu_seqlens: Tensor, batch: int, length: int) -> tuple[tuple[int, int], ...]:
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


def _problem(
    draw: Draw,
    batch: int,
    length: int,
    heads: tuple[int, int] = (2, 2),
    widths: tuple[int, int] = (8, 8),
    decay: float = 0.5,
    key_scale: float = 1.0,
) -> tuple[Tensor, ...]:
    """Query, key, value, g and beta. Without l2 norm, keys longer than 1 make the state grow: see ``key_scale``."""
    (key_heads, value_heads), (key_width, value_width) = heads, widths
    q = draw.normal(batch, length, key_heads, key_width)
    k = draw.normal(batch, length, key_heads, key_width, scale=key_scale)
    v = draw.normal(batch, length, value_heads, value_width)
    g = -draw.normal(batch, length, value_heads, scale=decay).abs().float()
    beta = draw.normal(batch, length, value_heads).sigmoid()
    return leaf(q), leaf(k), leaf(v), leaf(g), leaf(beta)


def _state(draw: Draw, sequences: int, heads: int = 2, key_width: int = 8, value_width: int = 8) -> Tensor:
    return leaf(draw.normal(sequences, heads, key_width, value_width).float())


def _bounds_at(device: torch.device, *ends: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor((0, *ends), dtype=dtype, device=device)


_NORMED: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield Sample("odd sizes", _problem(draw, 2, 13, (3, 3), (7, 5)), _NORMED)
    kept = {**_NORMED, "output_final_state": True}
    yield Sample("both states", _problem(draw, 2, 19), {"initial_state": _state(draw, 2), **kept})
    packed = {"cu_seqlens": _bounds_at(device, 1, 9, 24), "initial_state": _state(draw, 3), **kept}
    yield Sample("packed, both states", _problem(draw, 1, 24), packed)
    yield Sample("grouped heads", _problem(draw, 2, 11, (2, 4), (8, 6)), _NORMED)
    yield Sample("no l2 norm", _problem(draw, 2, 17, key_scale=0.3), {"output_final_state": True})
    yield Sample("past a chunk", _problem(draw, 1, 67, (1, 1)), kept)
    wide = [leaf(x.detach().repeat_interleave(2, dim=1)[:, ::2]) for x in _problem(draw, 2, 10)]
    yield Sample("every other token", tuple(wide), _NORMED)
    transposed = [leaf(x.detach().transpose(1, 2).contiguous().transpose(1, 2)) for x in _problem(draw, 2, 9)]
    yield Sample("heads before tokens in memory", tuple(transposed), _NORMED)
    yield from _edges(device, dtype)


def _edges(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Lengths around chunks of 16, 32 and 64 tokens, boundaries on and beside them, and decays from none to all."""
    draw = Draw(device, dtype, seed=3)

    def edge(name: str, problem: tuple[Tensor, ...], **options: Any) -> Sample:
        return Sample(name, problem, {**_NORMED, **options}, values_only=True)

    for length in (1, 2, 15, 16, 33, 63, 64, 65, 129):
        state = _state(draw, 1)
        name = "1 token" if length == 1 else f"{length} tokens"
        yield edge(name, _problem(draw, 1, length), initial_state=state, output_final_state=True)
    yield edge("no tokens", _problem(draw, 2, 0), initial_state=_state(draw, 2), output_final_state=True)
    for ends in ((64, 128), (63, 64, 65, 131), (1, 2, 3, 70), (5, 5, 40, 40)):
        bounds, states = _bounds_at(device, *ends), _state(draw, len(ends))
        words = f"packed at {', '.join(map(str, ends))}"
        problem = _problem(draw, 1, ends[-1])
        yield edge(words, problem, cu_seqlens=bounds, initial_state=states, output_final_state=True)
    yield edge("one packed sequence", _problem(draw, 1, 21), cu_seqlens=_bounds_at(device, 21, dtype=torch.int64))
    yield edge("packed without states", _problem(draw, 1, 75), cu_seqlens=_bounds_at(device, 30, 75))
    yield edge("packed, grouped heads", _problem(draw, 1, 40, (1, 3)), cu_seqlens=_bounds_at(device, 7, 40))
    yield edge("large decay", _problem(draw, 2, 70, decay=30.0), initial_state=_state(draw, 2), output_final_state=True)
    q, k, v, g, beta = _problem(draw, 1, 70)
    sudden = g.detach().clone()
    sudden[:, 5::9] = -500.0  # everything is forgotten here, and what comes after is as exact as ever
    yield edge("forgets at once", (q, k, v, leaf(sudden), beta), initial_state=_state(draw, 1), output_final_state=True)
    yield edge("no decay", (q, k, v, leaf(torch.zeros_like(g)), beta), output_final_state=True)
    yield edge("beta up to 2", (q, k, v, g, leaf(beta.detach() * 2)), output_final_state=True)
    yield edge("another scale", _problem(draw, 2, 12), scale=0.7)
    yield edge("values narrower than keys", _problem(draw, 2, 20, widths=(12, 3)), output_final_state=True)
    yield edge("values wider than keys", _problem(draw, 2, 20, widths=(4, 24)), output_final_state=True)


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    kept = {**_NORMED, "output_final_state": True}
    yield Sample("past 128 columns", _problem(draw, 1, 35, (1, 2), (136, 144)), kept)
    bounds, states = _bounds_at(device, 3, 131, 150, 290), _state(draw, 4, 2, 24, 40)
    problem = _problem(draw, 1, 290, (2, 2), (24, 40), decay=0.05)
    yield Sample("packed, five chunks", problem, {"cu_seqlens": bounds, "initial_state": states, **kept})


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    kept = {**_NORMED, "output_final_state": True}
    yield Sample("a model's heads", _problem(draw, 1, 1027, (2, 4), (128, 128), decay=0.05), kept)
    problem = _problem(draw, 1, 2051, (1, 2), (128, 128), decay=0.01)
    yield Sample("packed, long", problem, {"cu_seqlens": _bounds_at(device, 17, 1400, 2051), **kept})


# In low precision kernels round queries, keys and corrections of the state to feed matrix units, which transformers'
# own code does not.
VALUES = {
    "float32": Tolerance(element=2e-5, norm=4e-6),
    "bfloat16": Tolerance(element=4e-2, norm=1e-2),
    "float16": Tolerance(element=6e-3, norm=1.5e-3),
}
GRADIENTS = {
    "float32": Tolerance(element=6e-5, norm=1e-5),
    "bfloat16": Tolerance(element=1e-1, norm=2e-2),
    "float16": Tolerance(element=1.5e-2, norm=3e-3),
}


def _present(result: Any) -> tuple[Tensor, ...]:
    return tuple(each for each in as_tensors(result) if each is not None)


CONTRACTS = {
    "standard": Contract(
        op_name="chunk_gated_delta_rule",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        primary=_present,
        # The boundaries of packed sequences are not one per row. Named here, they leave packed calls without rows.
        rows=("query", "key", "value", "g", "beta", "initial_state", "cu_seqlens"),
    ),
}
