"""The convolution where the positions of a channel are adjacent in memory, and fill whole vectors.

A lane has one vector: some neighbouring positions of a channel. It loads the vectors beside it too, which neighbouring
lanes load at the same time, so that they come from the L1 cache. A program has a tile of lanes, of some channels and
neighbouring vectors, and walks along a run of positions for the sums of the taps' gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from veomni_ops.triton_gpus import register_limit
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.activations import silu
from veomni_triton.causal_conv1d.arithmetic import (
    bias_of,
    convolved,
    gradient_of_x,
    taps_of,
    upstream_of_sum,
    with_position,
)
from veomni_triton.causal_conv1d.launch import Launch
from veomni_triton.causal_conv1d.layout import positions_of_a_vector
from veomni_triton.causal_conv1d.vectors import numbers_of, store_vectors, vectors_of


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, has_silu: bool, y: Tensor, launch: Launch
) -> None:
    """As :func:`channels_adjacent.forward`, for ``x`` with adjacent positions and a contiguous ``y``."""
    _, channels, positions = x.shape
    _forward_kernel[launch.grid(x)](
        x,
        weight,
        bias,
        seq_idx,
        y,
        positions,
        launch.run(x) // launch.step,
        channels,
        x.stride(0),
        x.stride(1),
        WIDTH=weight.shape[1],
        SILU=has_silu,
        CHANNELS=launch.channels,
        STEP=launch.step,
        VECTOR=positions_of_a_vector(x),
        num_warps=launch.warps,
        **register_limit(x.device, launch.registers),
    )


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    has_silu: bool,
    dx: Tensor,
    launch: Launch,
) -> Tensor:
    """As :func:`channels_adjacent.backward`, for ``dy`` and ``x`` with adjacent positions and a contiguous ``dx``."""
    _, channels, positions = x.shape
    partials = launch.partials(x, weight)
    _backward_kernel[launch.grid(x)](
        dy,
        x,
        weight,
        bias,
        seq_idx,
        dx,
        partials,
        positions,
        launch.run(x) // launch.step,
        channels,
        dy.stride(0),
        dy.stride(1),
        x.stride(0),
        x.stride(1),
        WIDTH=weight.shape[1],
        SILU=has_silu,
        CHANNELS=launch.channels,
        STEP=launch.step,
        VECTOR=positions_of_a_vector(x),
        num_warps=launch.warps,
        **register_limit(x.device, launch.registers),
    )
    return partials


# B sequences of S = positions, C = channels, W = WIDTH taps. S is a multiple of VECTOR. A tile has CHANNELS channels
# and STEP positions of each, on CHANNELS * STEP / VECTOR = L lanes. Blocks are [L], in float32 from load to store;
# tuples hold blocks of neighbouring positions, whole vectors of them. Offsets of rows are int64, since B * S * C can
# exceed 2**31.
@triton_kernel(do_not_specialize=["run"], do_not_specialize_on_alignment=["weight", "bias"])
def _forward_kernel(
    x,  # [B, C, S], contiguous along S
    weight,  # [C, W]
    bias,  # [C] or None
    seq_idx,  # [B, S] or None
    y,  # [B, C, S], contiguous, written
    positions,  # S
    run,  # of a program, in steps
    channels,  # C
    x_batch,
    x_channel,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    LANES: tl.constexpr = CHANNELS * (STEP // VECTOR)
    BESIDE: tl.constexpr = (WIDTH - 1 + VECTOR - 1) // VECTOR  # vectors that the W - 1 positions before one are in
    batch, block, _, first, end = _place(positions, run, channels, CHANNELS, STEP)
    channel = block + tl.arange(0, LANES) // (STEP // VECTOR)
    offset = tl.arange(0, LANES) % (STEP // VECTOR) * VECTOR
    x += batch * x_batch + channel.to(tl.int64) * x_channel
    y += (batch * channels + channel) * positions
    if seq_idx is not None:
        seq_idx += batch * positions
    taps = taps_of(weight, channel, channels, WIDTH)
    added = bias_of(bias, channel, channels)
    for step in range(first, end):
        position = step * STEP + offset
        inside = (channel < channels) & (position < positions)
        window = vectors_of(x, position, positions, inside, -BESIDE, 1, LANES, VECTOR)
        numbers = numbers_of(seq_idx, position, positions, -BESIDE, 1, LANES, VECTOR)
        results = ()
        for place in tl.static_range(VECTOR):
            total = convolved(window, numbers, taps, added, BESIDE * VECTOR + place, WIDTH, True)
            if SILU:
                total = silu(total)[0]
            results = results + (total,)
        store_vectors(y, position, results, inside, LANES, VECTOR)


@triton_kernel(do_not_specialize=["run"], do_not_specialize_on_alignment=["weight", "bias"])
def _backward_kernel(
    dy,  # [B, C, S], contiguous along S
    x,  # [B, C, S], contiguous along S
    weight,  # [C, W]
    bias,  # [C] or None
    seq_idx,  # [B, S] or None
    dx,  # [B, C, S], contiguous, written
    partials,  # [P, W + 1, C], float32, written
    positions,  # S
    run,  # of a program, in steps
    channels,  # C
    dy_batch,
    dy_channel,
    x_batch,
    x_channel,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    LANES: tl.constexpr = CHANNELS * (STEP // VECTOR)
    BESIDE: tl.constexpr = (WIDTH - 1 + VECTOR - 1) // VECTOR
    HERE: tl.constexpr = BESIDE * VECTOR  # the place of a lane's first position in a window
    batch, block, row, first, end = _place(positions, run, channels, CHANNELS, STEP)
    channel = block + tl.arange(0, LANES) // (STEP // VECTOR)
    offset = tl.arange(0, LANES) % (STEP // VECTOR) * VECTOR
    dy += batch * dy_batch + channel.to(tl.int64) * dy_channel
    x += batch * x_batch + channel.to(tl.int64) * x_channel
    dx += (batch * channels + channel) * positions
    if seq_idx is not None:
        seq_idx += batch * positions
    taps = taps_of(weight, channel, channels, WIDTH)
    added = bias_of(bias, channel, channels)
    dtaps = ()
    for _ in tl.static_range(WIDTH):
        dtaps = dtaps + (tl.zeros((LANES,), tl.float32),)
    dbias = tl.zeros((LANES,), tl.float32)
    for step in range(first, end):
        position = step * STEP + offset
        inside = (channel < channels) & (position < positions)
        window = vectors_of(x, position, positions, inside, -BESIDE, 1 + BESIDE, LANES, VECTOR)
        upstream = vectors_of(dy, position, positions, inside, 0, 1 + BESIDE, LANES, VECTOR)
        numbers = numbers_of(seq_idx, position, positions, -BESIDE, 1 + BESIDE, LANES, VECTOR)
        # The sums that the lane's positions went into: theirs, and those of the W - 1 positions after them.
        dtotals = ()
        for place in tl.static_range(VECTOR + WIDTH - 1):
            total = convolved(window, numbers, taps, added, HERE + place, WIDTH, True)
            dtotals = dtotals + (upstream_of_sum(upstream[place], total, SILU),)
        for place in tl.static_range(VECTOR):
            dtaps, dbias = with_position(dtaps, dbias, dtotals[place], window, numbers, HERE + place, WIDTH, True)
        results = ()
        for place in tl.static_range(VECTOR):
            results = results + (gradient_of_x(dtotals, numbers[HERE:], taps, place, WIDTH, True),)
        store_vectors(dx, position, results, inside, LANES, VECTOR)
    # A row of its own for each run, added up by another kernel: atomics would add in a random order.
    channel = block + tl.arange(0, CHANNELS)  # [CHANNELS]
    partials += row * (WIDTH + 1) * channels + channel
    for back in tl.static_range(WIDTH):
        found = tl.sum(tl.reshape(dtaps[back], (CHANNELS, STEP // VECTOR)), axis=1)
        tl.store(partials + (WIDTH - 1 - back) * channels, found, mask=channel < channels)
    found = tl.sum(tl.reshape(dbias, (CHANNELS, STEP // VECTOR)), axis=1)
    tl.store(partials + WIDTH * channels, found, mask=channel < channels)


@triton.jit
def _place(positions, run, channels, CHANNELS: tl.constexpr, STEP: tl.constexpr):
    """The program's sequence (int64), first channel, run's number among all (int64), first step and end of steps."""
    # Neighbours in the grid have neighbouring runs of the same channels.
    steps = tl.cdiv(positions, STEP)
    runs = tl.cdiv(steps, run)
    first, others = tl.program_id(0) % runs, tl.program_id(0) // runs
    blocks = tl.cdiv(channels, CHANNELS)
    batch = others // blocks
    row = (batch * runs + first).to(tl.int64)
    first *= run
    return batch.to(tl.int64), others % blocks * CHANNELS, row, first, tl.minimum(first + run, steps)
