"""Device code of load_balancing_loss. Tiles are ``[TOKENS, 4, WIDTH / 4]``: a row of logits, cut into four quarters.

Triton spreads the threads over the last dimension, then over the first, so a thread holds the same columns of all four
quarters, and a reduction over experts takes two shuffles less than over an uncut row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums_kernel(
    gate_logits,
    mask,
    sums,
    tokens,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program's sums per expert, ``sums[program, 0]`` of routes and ``sums[program, 1]`` of probabilities."""
    layer = tl.program_id(1)
    logits = _logits_of(gate_logits, layer, LAYERS)
    expert = _experts(WIDTH)
    routes = tl.zeros((TOKENS, 4, WIDTH // 4), tl.float32)
    probabilities = tl.zeros((TOKENS, 4, WIDTH // 4), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0), num_stages=STAGES):
        token = _tokens(tile, TOKENS)
        counts = _counts(mask, token, tokens)
        softmax = _softmax(logits, token, tokens, expert, EXPERTS).to(logits.dtype.element_ty)
        rank = _rank(softmax, expert, WIDTH)
        routes += tl.where(rank >= _kth_largest(rank, K), counts, 0.0)
        probabilities += softmax.to(tl.float32) * counts
    program = layer * tl.num_programs(0) + tl.program_id(0)
    place = sums + program * 2 * WIDTH + expert
    tl.store(place, tl.sum(routes, axis=0, keep_dims=True))
    tl.store(place + WIDTH, tl.sum(probabilities, axis=0, keep_dims=True))


@triton.jit
def loss_kernel(
    sums,
    loss,
    slope,
    programs,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The loss and its slope from all programs' sums, by one program, in a fixed order."""
    expert = tl.arange(0, WIDTH)
    routes = tl.zeros((ROWS, WIDTH), tl.float32)
    probabilities = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)[:, None]
        place = sums + program * 2 * WIDTH + expert[None, :]
        routes += tl.load(place, mask=program < programs, other=0.0)
        probabilities += tl.load(place + WIDTH, mask=program < programs, other=0.0)
    # Every token that counts takes K routes, so the routes count the tokens.
    tokens = tl.sum(routes) / K
    share = tl.sum(routes, axis=0) / tokens
    tl.store(loss, EXPERTS * tl.sum(share * (tl.sum(probabilities, axis=0) / tokens)))
    tl.store(slope + expert, EXPERTS * share / tokens, mask=expert < EXPERTS)


@triton.jit
def gradients_kernel(
    gate_logits,
    mask,
    dloss,
    slope,
    dlogits,
    tokens,
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``dlogits[layer, token] = counts · softmax · (d - Σ softmax · d)`` with ``d = dloss · slope``; a tile each."""
    layer = tl.program_id(1)
    logits = _logits_of(gate_logits, layer, LAYERS)
    expert = _experts(WIDTH)
    token = _tokens(tl.program_id(0), TOKENS)
    counts = _counts(mask, token, tokens)
    dsoftmax = tl.load(slope + expert, mask=expert < EXPERTS, other=0.0) * tl.load(dloss)
    softmax = _softmax(logits, token, tokens, expert, EXPERTS)
    gradient = softmax * (dsoftmax - _row_sum(softmax * dsoftmax)) * counts
    row = layer.to(tl.int64) * tokens + token
    tl.store(dlogits + row * EXPERTS + expert, gradient, mask=(token < tokens) & (expert < EXPERTS))


@triton.jit
def _logits_of(gate_logits, layer, LAYERS: tl.constexpr):
    """``gate_logits[layer]`` of a tuple of pointers, which can only be indexed by constants."""
    logits = gate_logits[0]
    for other in tl.static_range(1, LAYERS):
        logits = tl.where(layer == other, gate_logits[other], logits)
    return logits


@triton.jit
def _experts(WIDTH: tl.constexpr):
    quarter = tl.arange(0, 4)[None, :, None] * (WIDTH // 4)
    return quarter + tl.arange(0, WIDTH // 4)[None, None, :]


@triton.jit
def _tokens(tile, TOKENS: tl.constexpr):
    return (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]


@triton.jit
def _counts(mask, token, tokens):
    """How much each token counts: 0 past the end, else what ``mask`` says."""
    counts = token < tokens
    if mask is not None:
        counts = tl.load(mask + token, mask=counts, other=0)
    return counts.to(tl.float32)


@triton.jit
def _softmax(logits, token, tokens, expert, EXPERTS: tl.constexpr):
    # Rows past the end hold zeros: minus infinity throughout would make NaN, which no count of 0 takes away.
    tile = tl.load(logits + token * EXPERTS + expert, mask=(token < tokens) & (expert < EXPERTS), other=0.0)
    tile = tl.where(expert < EXPERTS, tile.to(tl.float32), float("-inf"))
    exponentials = tl.exp(tile - tl.max(tl.max(tile, axis=1), axis=1)[:, None, None])
    return exponentials * (1.0 / _row_sum(exponentials))


@triton.jit
def _row_sum(tile):
    return tl.sum(tl.sum(tile, axis=1), axis=1)[:, None, None]


@triton.jit
def _rank(softmax, expert, WIDTH: tl.constexpr):
    """Distinct integers in the order of the probabilities; among equals, the lowest expert is the largest.

    The bits of a float32 that isn't negative order as integers. The low 13 of one that float16 or bfloat16 can hold
    are 0, which leaves room for the expert; float32 itself needs wider integers.
    """
    bits = softmax.to(tl.float32).to(tl.int32, bitcast=True)
    if softmax.dtype == tl.float32:
        bits = bits.to(tl.int64) << 13
    return bits | (WIDTH - 1 - expert)


@triton.jit
def _kth_largest(rank, K: tl.constexpr):
    """Each token's K-th largest rank, by K maxima over stacks of four, sorted once.

    Taking a maximum off a stack costs 1.5 operations per element and round; masking it out of the row would cost 3.
    """
    pairs = tl.permute(rank, (0, 2, 1)).reshape(rank.shape[0], rank.shape[2], 2, 2)
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    first, second = tl.maximum(first, second), tl.minimum(first, second)
    third, fourth = tl.maximum(third, fourth), tl.minimum(third, fourth)
    first, third = tl.maximum(first, third), tl.minimum(first, third)
    second, fourth = tl.maximum(second, fourth), tl.minimum(second, fourth)
    second, third = tl.maximum(second, third), tl.minimum(second, third)
    largest = tl.max(first, axis=1)
    for _ in tl.static_range(K - 1):
        taken = first == largest[:, None]
        first = tl.where(taken, second, first)
        second = tl.where(taken, third, second)
        third = tl.where(taken, fourth, third)
        fourth = tl.where(taken, -1, fourth)
        largest = tl.max(first, axis=1)
    return largest[:, None, None]
