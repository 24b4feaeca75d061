"""The convolution where the channels of a position are adjacent in memory, as of a transposed ``[B, S, C]``.

A program takes some channels, and walks along a run of positions. It keeps the last few positions in registers: so
every element is read once, whatever the width, but for the few beside a run. Backward keeps the gradients of the last
sums likewise, and writes a position's gradient as soon as the last sum that it went into is known.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from veomni_triton.activations import silu
from veomni_triton.causal_conv1d.arithmetic import bias_of, convolved, gradient_of_x, taps_of, upstream_of_sum, visible
from veomni_triton.causal_conv1d.launch import Launch


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, has_silu: bool, y: Tensor, launch: Launch
) -> None:
    """Write the convolution of ``x`` into ``y``.

    Args:
        x: ``[B, C, S]`` with adjacent channels.
        weight: ``[C, W]``, contiguous.
        bias: ``[C]``, contiguous, or ``None``.
        seq_idx: integers ``[B, S]``, contiguous, or ``None``.
        has_silu: Whether SiLU follows.
        y: ``[B, C, S]``, a transposed contiguous ``[B, S, C]``, written.
        launch: Channels and positions of a program.
    """
    _, channels, positions = x.shape
    _forward_kernel[launch.grid(x)](
        x,
        weight,
        bias,
        seq_idx,
        y,
        positions,
        launch.run(x),
        channels,
        x.stride(0),
        x.stride(2),
        WIDTH=weight.shape[1],
        SILU=has_silu,
        CHANNELS=launch.channels,
        STEP=launch.step,
        num_warps=launch.warps,
        maxnreg=launch.registers,
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
    """Write the gradient of ``x`` into ``dx``, which is laid out as forward's ``y``; the others are forward's.

    Returns:
        ``[P, W + 1, C]``, float32: partial sums of the gradients of the taps, the earliest position's first, and of the
        bias.
    """
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
        launch.run(x),
        channels,
        dy.stride(0),
        dy.stride(2),
        x.stride(0),
        x.stride(2),
        WIDTH=weight.shape[1],
        SILU=has_silu,
        CHANNELS=launch.channels,
        STEP=launch.step,
        num_warps=launch.warps,
        maxnreg=launch.registers,
    )
    return partials


# B sequences of S = positions, C = channels, W = WIDTH taps. Blocks are [CHANNELS], in float32 from load to store.
# Tuples hold blocks of neighbouring positions: the W - 1 before a step first, then the COUNT of the step. A run begins
# at `first` and ends before `end`. Offsets are int64, since B * S * C can exceed 2**31.
@triton.jit(do_not_specialize=["positions", "run"])
def _forward_kernel(
    x,  # [B, S, C], contiguous along C
    weight,  # [C, W]
    bias,  # [C] or None
    seq_idx,  # [B, S] or None
    y,  # [B, S, C], contiguous, written
    positions,  # S
    run,  # positions of a program
    channels,  # C
    x_batch,
    x_position,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
):
    PACKED: tl.constexpr = seq_idx is not None
    batch, first, end, channel, _ = _place(positions, run, channels, CHANNELS)
    x += batch * x_batch + channel
    y += batch * positions * channels + channel
    if PACKED:
        seq_idx += batch * positions
    inside = channel < channels
    taps = taps_of(weight, channel, channels, WIDTH)
    added = bias_of(bias, channel, channels)
    window = _guarded(x, first - (WIDTH - 1), positions, x_position, inside, WIDTH - 1)
    numbers = _numbers(seq_idx, first - (WIDTH - 1), positions, WIDTH - 1, PACKED)
    steps_end = first + (end - first) // STEP * STEP
    for start in range(first, steps_end, STEP):
        window, numbers = _forward_step(
            x, seq_idx, y, start, positions, channels, x_position, inside, window, numbers, taps, added,
            WIDTH, SILU, PACKED, STEP,
        )  # fmt: skip
    # What is left of a run at the end of its sequence.
    for start in range(steps_end, end):
        window, numbers = _forward_step(
            x, seq_idx, y, start, positions, channels, x_position, inside, window, numbers, taps, added,
            WIDTH, SILU, PACKED, 1,
        )  # fmt: skip


@triton.jit
def _forward_step(
    x, seq_idx, y, start, positions, channels, x_position, inside, window, numbers, taps, added,
    WIDTH: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """``COUNT`` positions from ``start`` on. Returns the window and the numbers as the next step needs them."""
    # All loads come before the first use, so that they are in flight together.
    window = window + _loaded(x, start, x_position, inside, COUNT)
    numbers = numbers + _numbers(seq_idx, start, positions, COUNT, PACKED)
    for step in tl.static_range(COUNT):
        total = convolved(window, numbers, taps, added, WIDTH - 1 + step, WIDTH, PACKED)
        if SILU:
            total, _ = silu(total)
        tl.store(y + tl.cast(start + step, tl.int64) * channels, total.to(y.dtype.element_ty), mask=inside)
    return window[COUNT:], numbers[COUNT:] if PACKED else numbers


@triton.jit(do_not_specialize=["positions", "run"])
def _backward_kernel(
    dy,  # [B, S, C], contiguous along C
    x,  # [B, S, C], contiguous along C
    weight,  # [C, W]
    bias,  # [C] or None
    seq_idx,  # [B, S] or None
    dx,  # [B, S, C], contiguous, written
    partials,  # [P, W + 1, C], float32, written
    positions,  # S
    run,  # positions of a program
    channels,  # C
    dy_batch,
    dy_position,
    x_batch,
    x_position,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
):
    PACKED: tl.constexpr = seq_idx is not None
    batch, first, end, channel, row = _place(positions, run, channels, CHANNELS)
    dy += batch * dy_batch + channel
    x += batch * x_batch + channel
    dx += batch * positions * channels + channel
    if PACKED:
        seq_idx += batch * positions
    inside = channel < channels
    taps = taps_of(weight, channel, channels, WIDTH)
    added = bias_of(bias, channel, channels)
    window = _guarded(x, first - (WIDTH - 1), positions, x_position, inside, WIDTH - 1)
    numbers = _numbers(seq_idx, first - (WIDTH - 1), positions, WIDTH - 1, PACKED)
    # Those before the run are never used: they belong to gradients that the run before this one writes.
    dtotals = _zeros(channel, WIDTH - 1)
    dtaps = _zeros(channel, WIDTH)
    dbias = tl.zeros(channel.shape, tl.float32)
    steps_end = first + (end - first) // STEP * STEP
    for start in range(first, steps_end, STEP):
        window, numbers, dtotals, dtaps, dbias = _backward_step(
            dy, x, seq_idx, dx, first, start, positions, channels, dy_position, x_position, inside, window, numbers,
            dtotals, taps, added, dtaps, dbias, WIDTH, SILU, PACKED, STEP,
        )  # fmt: skip
    for start in range(steps_end, end):
        window, numbers, dtotals, dtaps, dbias = _backward_step(
            dy, x, seq_idx, dx, first, start, positions, channels, dy_position, x_position, inside, window, numbers,
            dtotals, taps, added, dtaps, dbias, WIDTH, SILU, PACKED, 1,
        )  # fmt: skip
    # The last W - 1 positions of the run went into sums after it too.
    window = window + _guarded(x, end, positions, x_position, inside, WIDTH - 1)
    upstream = _guarded(dy, end, positions, dy_position, inside, WIDTH - 1)
    numbers = numbers + _numbers(seq_idx, end, positions, WIDTH - 1, PACKED)
    for step in tl.static_range(WIDTH - 1):
        total = convolved(window, numbers, taps, added, WIDTH - 1 + step, WIDTH, PACKED)
        dtotal = upstream_of_sum(upstream[step], total, SILU)
        # Beyond the last position there is no sum. What was computed there could be a NaN, of an infinite x before it.
        dtotals = dtotals + (tl.where(end + step < positions, dtotal, 0.0),)
        gradient = gradient_of_x(dtotals, numbers, taps, step, WIDTH, PACKED)
        position = end + step - (WIDTH - 1)
        at = dx + tl.cast(position, tl.int64) * channels
        tl.store(at, gradient.to(dx.dtype.element_ty), mask=inside & (position >= first))
    # A row of its own for each program, added up by another kernel: atomics would add in a random order.
    partials += row * (WIDTH + 1) * channels + channel
    for back in tl.static_range(WIDTH):
        tl.store(partials + (WIDTH - 1 - back) * channels, dtaps[back], mask=inside)
    tl.store(partials + WIDTH * channels, dbias, mask=inside)


@triton.jit
def _backward_step(
    dy, x, seq_idx, dx, first, start, positions, channels, dy_position, x_position, inside, window, numbers,
    dtotals, taps, added, dtaps, dbias,
    WIDTH: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """``COUNT`` positions from ``start`` on. Returns all that the next step needs."""
    window = window + _loaded(x, start, x_position, inside, COUNT)
    upstream = _loaded(dy, start, dy_position, inside, COUNT)
    numbers = numbers + _numbers(seq_idx, start, positions, COUNT, PACKED)
    for step in tl.static_range(COUNT):
        total = convolved(window, numbers, taps, added, WIDTH - 1 + step, WIDTH, PACKED)
        dtotal = upstream_of_sum(upstream[step], total, SILU)
        dtotals = dtotals + (dtotal,)
        dbias += dtotal
        sums = ()
        for back in tl.static_range(WIDTH):
            earlier = visible(window, numbers, WIDTH - 1 + step - back, WIDTH - 1 + step, PACKED)
            sums = sums + (dtaps[back] + dtotal * earlier,)
        dtaps = sums
        # With this sum, all are known that the position W - 1 earlier went into.
        gradient = gradient_of_x(dtotals, numbers, taps, step, WIDTH, PACKED)
        position = start + step - (WIDTH - 1)
        at = dx + tl.cast(position, tl.int64) * channels
        tl.store(at, gradient.to(dx.dtype.element_ty), mask=inside & (position >= first))
    return window[COUNT:], numbers[COUNT:] if PACKED else numbers, dtotals[COUNT:], dtaps, dbias


@triton.jit
def _place(positions, run, channels, CHANNELS: tl.constexpr):
    """The program's sequence (int64), first position and end, channels, and the number of its run among all (int64)."""
    # Neighbours in the grid have neighbouring channels of one run.
    blocks = tl.cdiv(channels, CHANNELS)
    row, runs = tl.program_id(0) // blocks, tl.cdiv(positions, run)
    first = row % runs * run
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    return (row // runs).to(tl.int64), first, tl.minimum(first + run, positions), channel, row.to(tl.int64)


@triton.jit
def _loaded(x, start, stride, inside, COUNT: tl.constexpr):
    """``COUNT`` positions from ``start`` on, all of which exist."""
    values = ()
    for step in tl.static_range(COUNT):
        at = x + tl.cast(start + step, tl.int64) * stride
        values = values + (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
    return values


@triton.jit
def _guarded(x, start, positions, stride, inside, COUNT: tl.constexpr):
    """``COUNT`` positions from ``start`` on, with zeros for those that don't exist."""
    values = ()
    for step in tl.static_range(COUNT):
        position = start + step
        exists = (position >= 0) & (position < positions)
        at = x + tl.cast(position, tl.int64) * stride
        values = values + (tl.load(at, mask=inside & exists, other=0.0).to(tl.float32),)
    return values


@triton.jit
def _numbers(seq_idx, start, positions, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """The numbers of the sequences that ``COUNT`` positions belong to; none if they aren't packed."""
    values = ()
    if PACKED:
        for step in tl.static_range(COUNT):
            position = start + step
            # Beyond the ends x is zeros, so that any number does.
            exists = (position >= 0) & (position < positions)
            values = values + (tl.load(seq_idx + position, mask=exists, other=0),)
    return values


@triton.jit
def _zeros(like, COUNT: tl.constexpr):
    """``COUNT`` blocks of zeros."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (tl.zeros(like.shape, tl.float32),)
    return values
