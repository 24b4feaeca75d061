"""Device code of load_balancing_loss. Tiles are ``[TOKENS, 4, WIDTH / 4]``: rows of logits, cut into four quarters.

Triton distributes threads over the last dimension, then over the first. A thread therefore holds the same columns of
all four quarters, and a reduction over experts takes two shuffles less than over an uncut row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel

# L layers, T tokens of each, E experts, K choices per token; WIDTH is E padded to a power of two of at least 4, P the
# programs of sums_kernel over all layers. `token` is [TOKENS, 1, 1], `expert` [1, 4, WIDTH / 4], so that tokens and
# experts broadcast to a tile.


@triton_kernel
def sums_kernel(
    gate_logits,  # L tensors [T, E]
    mask,  # [T] or None, the weight of each token
    sums,  # [P, 2, WIDTH], float32, written
    tokens,  # T
    LAYERS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program's sums per expert, ``sums[program, 0]`` of routes and ``sums[program, 1]`` of probabilities.

    The grid is ``(P // L, L)``. Each program writes a row of its own: atomics would add in an order that varies.
    """
    layer = tl.program_id(1)
    logits = _logits_of(gate_logits, layer, LAYERS)
    expert = _experts(WIDTH)
    # Summed over tokens after the loop: within it, elements stay in their thread.
    routes = tl.zeros((TOKENS, 4, WIDTH // 4), tl.float32)
    probabilities = tl.zeros((TOKENS, 4, WIDTH // 4), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0), num_stages=STAGES):
        token = _tokens(tile, TOKENS)
        counts = _counts(mask, token, tokens)  # [TOKENS, 1, 1]
        # Rounded to the logits' dtype as PyTorch's softmax does: rounding makes ties, which decide the top k.
        softmax = _softmax(logits, token, tokens, expert, EXPERTS).to(logits.dtype.element_ty)  # a tile
        rank = _rank(softmax, expert, WIDTH)  # a tile
        # Ranks are distinct, so exactly K of a row are at least the K-th largest.
        routes += tl.where(rank >= _kth_largest(rank, K), counts, 0.0)
        probabilities += softmax.to(tl.float32) * counts
    program = layer * tl.num_programs(0) + tl.program_id(0)
    place = sums + program * 2 * WIDTH + expert  # [1, 4, WIDTH / 4]; padded experts are stored as well, unmasked
    tl.store(place, tl.sum(routes, axis=0, keep_dims=True))
    tl.store(place + WIDTH, tl.sum(probabilities, axis=0, keep_dims=True))


@triton_kernel
def loss_kernel(
    sums,  # [P, 2, WIDTH]
    loss,  # a scalar, written
    slope,  # [E], written
    programs,  # P
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The loss and its slope from all programs' sums, by one program, in a fixed order."""
    expert = tl.arange(0, WIDTH)  # [WIDTH]
    routes = tl.zeros((ROWS, WIDTH), tl.float32)  # [ROWS, WIDTH]
    probabilities = tl.zeros((ROWS, WIDTH), tl.float32)  # [ROWS, WIDTH]
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        place = sums + program * 2 * WIDTH + expert[None, :]
        routes += tl.load(place, mask=program < programs, other=0.0)
        probabilities += tl.load(place + WIDTH, mask=program < programs, other=0.0)
    # The sum of all tokens' weights: each token has K routes of its weight.
    tokens = tl.sum(routes) / K
    share = tl.sum(routes, axis=0) / tokens  # [WIDTH]
    tl.store(loss, EXPERTS * tl.sum(share * (tl.sum(probabilities, axis=0) / tokens)))
    # The loss is linear in the probabilities, and routes have no gradient: its slope is the same for every token.
    tl.store(slope + expert, EXPERTS * share / tokens, mask=expert < EXPERTS)


@triton_kernel
def gradients_kernel(
    gate_logits,  # L tensors [T, E], of the layers that need gradients
    mask,  # [T] or None
    dloss,  # a scalar
    slope,  # [E]
    dlogits,  # [L, T, E], written
    tokens,  # T
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
    counts = _counts(mask, token, tokens)  # [TOKENS, 1, 1]
    # Times dloss on the device, so that nothing waits for its value on the host. [1, 4, WIDTH / 4]
    dsoftmax = tl.load(slope + expert, mask=expert < EXPERTS, other=0.0) * tl.load(dloss)
    # Computed again from the logits, which are saved anyway, rather than saved as another [L, T, E].
    softmax = _softmax(logits, token, tokens, expert, EXPERTS)
    gradient = softmax * (dsoftmax - _row_sum(softmax * dsoftmax)) * counts
    row = layer.to(tl.int64) * tokens + token  # int64, since L * T * E can exceed 2**31
    tl.store(dlogits + row * EXPERTS + expert, gradient, mask=(token < tokens) & (expert < EXPERTS))


@triton.jit
def _logits_of(gate_logits, layer, LAYERS: tl.constexpr):
    """``gate_logits[layer]``, where a tuple of pointers can only be indexed by constants.

    The tensors come as a tuple, because stacking the layers would copy all logits.
    """
    logits = gate_logits[0]
    for other in tl.static_range(1, LAYERS):
        logits = tl.where(layer == other, gate_logits[other], logits)
    return logits


@triton.jit
def _experts(WIDTH: tl.constexpr):
    # [1, 4, WIDTH / 4]: each quarter is contiguous in memory, so that loads can be vectorised.
    quarter = tl.arange(0, 4)[None, :, None] * (WIDTH // 4)
    return quarter + tl.arange(0, WIDTH // 4)[None, None, :]


@triton.jit
def _tokens(tile, TOKENS: tl.constexpr):
    # [TOKENS, 1, 1], in int64, since T * E can exceed 2**31.
    return (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]


@triton.jit
def _counts(mask, token, tokens):
    """The weight of each token, ``[TOKENS, 1, 1]`` in float32: ``mask``'s, or 1 without a mask; 0 past the end."""
    counts = token < tokens
    if mask is not None:
        counts = tl.load(mask + token, mask=counts, other=0)
    return counts.to(tl.float32)


@triton.jit
def _softmax(logits, token, tokens, expert, EXPERTS: tl.constexpr):
    # Rows past the end are read as zeros: a row of minus infinities has a softmax of NaN, which times 0 is NaN again.
    tile = tl.load(logits + token * EXPERTS + expert, mask=(token < tokens) & (expert < EXPERTS), other=0.0)
    # Padded experts get a probability of 0.
    tile = tl.where(expert < EXPERTS, tile.to(tl.float32), float("-inf"))
    # Less the row's maximum, so that nothing overflows.
    exponentials = tl.exp(tile - tl.max(tl.max(tile, axis=1), axis=1)[:, None, None])
    # One division per row, and not one per element.
    return exponentials * (1.0 / _row_sum(exponentials))


@triton.jit
def _row_sum(tile):
    # [TOKENS, 1, 1]; first over the quarters, which are in one thread, then over the threads.
    return tl.sum(tl.sum(tile, axis=1), axis=1)[:, None, None]


@triton.jit
def _rank(softmax, expert, WIDTH: tl.constexpr):
    """A tile of distinct integers in the order of the probabilities; among equals, the lowest expert ranks highest.

    Floats that aren't negative order as their bits do as integers. A float16 or bfloat16 value in float32 has 13 low
    bits of 0, which hold the expert; float32 values use them all, and need int64.
    """
    bits = softmax.to(tl.float32).to(tl.int32, bitcast=True)
    if softmax.dtype == tl.float32:
        bits = bits.to(tl.int64) << 13
    # Reversed, so that of equal probabilities the lower expert has the larger rank, and padded experts the smallest.
    return bits | (WIDTH - 1 - expert)


@triton.jit
def _kth_largest(rank, K: tl.constexpr):
    """Each token's K-th largest rank, ``[TOKENS, 1, 1]``, by K maxima over stacks of four that are sorted once.

    A stack is the same column of all four quarters, and lies within one thread. Taking a maximum off a stack costs 1.5
    operations per element and round; masking it out of the row would cost 3.
    """
    # [TOKENS, WIDTH / 4, 2, 2]: tl.split takes apart a last dimension of two, so four quarters take two splits.
    pairs = tl.permute(rank, (0, 2, 1)).reshape(rank.shape[0], rank.shape[2], 2, 2)
    even, odd = tl.split(pairs)
    # [TOKENS, WIDTH / 4] each, the four quarters in order.
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    # A sorting network of five comparisons, in descending order: first is the top of every stack.
    first, second = tl.maximum(first, second), tl.minimum(first, second)
    third, fourth = tl.maximum(third, fourth), tl.minimum(third, fourth)
    first, third = tl.maximum(first, third), tl.minimum(first, third)
    second, fourth = tl.maximum(second, fourth), tl.minimum(second, fourth)
    second, third = tl.maximum(second, third), tl.minimum(second, third)
    largest = tl.max(first, axis=1)  # [TOKENS]
    for _ in tl.static_range(K - 1):
        # The one stack with the maximum on top (ranks are distinct) moves up by one; -1 is below every rank.
        taken = first == largest[:, None]
        first = tl.where(taken, second, first)
        second = tl.where(taken, third, second)
        third = tl.where(taken, fourth, third)
        fourth = tl.where(taken, -1, fourth)
        largest = tl.max(first, axis=1)
    return largest[:, None, None]
