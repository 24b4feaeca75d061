"""The gated delta rule token by token: outputs and final states whose bits no batch, length or packing changes.

A program has all keys and a few columns of the values of one value head, whose state it holds in registers. Every call
is of one binary for its dtype and widths: it always reads a first state and writes a last one, and is compiled for no
alignment and no size. Another binary might add up a state's keys in another order.

Shape legend: ``K`` key width, ``V`` columns of the values in a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.chunk_gated_delta_rule.call import Call
from veomni_triton.chunk_gated_delta_rule.launch import padded
from veomni_triton.chunk_gated_delta_rule.states import load_state, store_state
from veomni_triton.chunk_gated_delta_rule.tiles import NORM_EPS, indices

_COLUMNS = 8  # with the keys of one head, a state that the registers of one warp hold; not tuned
_POINTERS = ("q", "k", "v", "g", "beta", "chunks", "spans", "initial", "out", "final")
_SIZES = (
    *("scale", "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "g_token", "g_head"),
    *("beta_token", "beta_head", "key_width", "value_width", "value_heads", "group"),
)


@triton_kernel(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def recurrence_kernel(
    q,  # [tokens, H, key_width]
    k,  # [tokens, H, key_width]
    v,  # [tokens, HV, value_width]
    g,  # [tokens, HV]
    beta,  # [tokens, HV]
    chunks,  # [chunks, 2]: first token, number of tokens
    spans,  # [sequences, 2]: first chunk, and the one after the last
    initial,  # [sequences, HV, key_width, value_width] float32
    out,  # [tokens, HV, value_width]
    final,  # [sequences, HV, key_width, value_width] float32
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    key_width,
    value_width,
    value_heads,
    group,  # value heads of a key head
    NORMED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    tile, head, sequence = indices(tl.cdiv(value_width, V), value_heads)
    row_K, column_V = tl.arange(0, K), tile * V + tl.arange(0, V)
    is_key_K, is_value_V = row_K < key_width, column_V < value_width
    own = (sequence * value_heads + head) * tl.cast(key_width * value_width, tl.int64)
    state_KV = load_state(initial + own, tile * V, key_width, value_width, K, V)
    for chunk in range(tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1)):
        first = tl.load(chunks + 2 * chunk).to(tl.int64)
        for token in range(first, first + tl.load(chunks + 2 * chunk + 1)):
            q_K = _load(q + token * q_token + head // group * q_head + row_K, is_key_K)
            k_K = _load(k + token * k_token + head // group * k_head + row_K, is_key_K)
            if NORMED:
                q_K *= tl.rsqrt(tl.sum(q_K * q_K) + NORM_EPS)
                k_K *= tl.rsqrt(tl.sum(k_K * k_K) + NORM_EPS)
            v_V = _load(v + token * v_token + head * v_head + column_V, is_value_V)
            state_KV *= tl.exp(tl.load(g + token * g_token + head * g_head).to(tl.float32))
            rate = tl.load(beta + token * beta_token + head * beta_head).to(tl.float32)
            missing_V = (v_V - tl.sum(state_KV * k_K[:, None], axis=0)) * rate
            state_KV += k_K[:, None] * missing_V[None, :]
            out_V = tl.sum(state_KV * (q_K * scale)[:, None], axis=0)
            place_V = out + (token * value_heads + head) * value_width + column_V
            tl.store(place_V, out_V.to(out.dtype.element_ty), mask=is_value_V)
    store_state(final + own, state_KV, tile * V, key_width, value_width, K, V)


@triton.jit
def _load(places, mask):
    return tl.load(places, mask=mask, other=0.0).to(tl.float32)


def write_in_order(call: Call, initial: Tensor | None, final: Tensor | None, out: Tensor) -> None:
    """The outputs of all tokens, and the states after the last of each sequence."""
    (key_width, value_width), heads = call.widths, call.value_heads
    shape = (call.sequences, heads, key_width, value_width)
    initial = call.q.new_zeros(shape, dtype=torch.float32) if initial is None else initial.float()
    recurrence_kernel[(ceil_div(value_width, _COLUMNS) * heads * call.sequences,)](
        call.q,
        call.k,
        call.v,
        call.g,
        call.beta,
        call.chunks,
        call.spans,
        initial,
        out,
        torch.empty_like(initial) if final is None else final,
        call.scale,
        *call.q.stride()[1:3],
        *call.k.stride()[1:3],
        *call.v.stride()[1:3],
        *call.g.stride()[1:],
        *call.beta.stride()[1:],
        *call.sizes,
        NORMED=call.normed,
        K=padded(key_width),
        V=_COLUMNS,
        num_warps=1,
        num_stages=1,
    )
