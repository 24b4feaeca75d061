"""The convolution where the channels of a position are adjacent in memory, as of a transposed ``[B, S, C]``.

A program takes some channels, and walks along a run of positions. It keeps the last few positions in registers: so
every element is read once, whatever the width, but for the few beside a run. Backward keeps the gradients of the last
sums likewise, and writes a position's gradient as soon as the last sum that it went into is known.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from veomni_ops.triton_gpus import register_limit
from veomni_ops.triton_launches import triton_kernel
from veomni_triton.causal_conv1d.arithmetic import bias_of, gradients_of, results_of, taps_of
from veomni_triton.causal_conv1d.launch import Launch
from veomni_triton.causal_conv1d.runs import guarded, loaded, numbers_of, place, zeros


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
        STAGES=launch.stages,
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
        STAGES=launch.stages,
        num_warps=launch.warps,
        **register_limit(x.device, launch.registers),
    )
    return partials


# B sequences of S = positions, C = channels, W = WIDTH taps. Blocks are [CHANNELS], in float32 from load to store.
# Tuples hold blocks of neighbouring positions: the W - 1 before a step first, then the COUNT of the step. A run begins
# at `first` and ends before `end`. Offsets are int64, since B * S * C can exceed 2**31.
@triton_kernel(do_not_specialize=["positions", "run"], do_not_specialize_on_alignment=["weight", "bias", "seq_idx"])
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
    STAGES: tl.constexpr,
):
    batch, first, end, channel, _ = place(positions, run, channels, CHANNELS)
    x += batch * x_batch + channel
    y += batch * positions * channels + channel
    if seq_idx is not None:
        seq_idx += batch * positions
    inside = channel < channels
    taps = taps_of(weight, channel, channels, WIDTH)
    added = bias_of(bias, channel, channels)
    window = guarded(x, first - (WIDTH - 1), positions, x_position, inside, WIDTH - 1)
    steps_end = first + (end - first) // STEP * STEP
    mixed_end = first
    if seq_idx is None:
        # The first steps see positions before the first one. In packed sequences any step may see another sequence.
        mixed_end = tl.minimum(tl.maximum(first, tl.cdiv(WIDTH - 1, STEP) * STEP), steps_end)
        for start in range(first, mixed_end, STEP):
            window = _forward_step(
                x, seq_idx, y, start, positions, channels, x_position, inside,
                window, taps, added, WIDTH, SILU, True, STEP,
            )  # fmt: skip
    for start in tl.range(mixed_end, steps_end, STEP, num_stages=STAGES):
        window = _forward_step(
            x, seq_idx, y, start, positions, channels, x_position, inside,
            window, taps, added, WIDTH, SILU, seq_idx is not None, STEP,
        )  # fmt: skip
    # What is left of the last run after whole steps.
    for start in range(steps_end, end):
        window = _forward_step(
            x, seq_idx, y, start, positions, channels, x_position, inside,
            window, taps, added, WIDTH, SILU, True, 1,
        )  # fmt: skip


@triton.jit
def _forward_step(
    x, seq_idx, y, start, positions, channels, x_position, inside, window, taps, added,
    WIDTH: tl.constexpr, SILU: tl.constexpr, MIXED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """``COUNT`` positions from ``start`` on. Returns the window as the next step needs it."""
    # All loads come before the first use: they are in flight together, or were loaded ahead.
    window = window + loaded(x, start, x_position, inside, COUNT)
    numbers = numbers_of(seq_idx, start - (WIDTH - 1), positions, WIDTH - 1 + COUNT)
    results = results_of(window, numbers, taps, added, WIDTH, SILU, MIXED, COUNT)
    for step in tl.static_range(COUNT):
        at = y + tl.cast(start + step, tl.int64) * channels
        tl.store(at, results[step].to(y.dtype.element_ty), mask=inside)
    return window[COUNT:]


@triton_kernel(do_not_specialize=["positions", "run"], do_not_specialize_on_alignment=["weight", "bias", "seq_idx"])
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
    STAGES: tl.constexpr,
):
    batch, first, end, channel, row = place(positions, run, channels, CHANNELS)
    dy += batch * dy_batch + channel
    x += batch * x_batch + channel
    dx += batch * positions * channels + channel
    if seq_idx is not None:
        seq_idx += batch * positions
    inside = channel < channels
    taps = taps_of(weight, channel, channels, WIDTH)
    added = bias_of(bias, channel, channels)
    window = guarded(x, first - (WIDTH - 1), positions, x_position, inside, WIDTH - 1)
    # Those before the run are never used: they belong to gradients that the run before this one writes.
    dtotals = zeros(channel, WIDTH - 1)
    dtaps = zeros(channel, WIDTH)
    dbias = tl.zeros(channel.shape, tl.float32)
    steps_end = first + (end - first) // STEP * STEP
    mixed_end = first
    if seq_idx is None:
        mixed_end = tl.minimum(tl.maximum(first, tl.cdiv(WIDTH - 1, STEP) * STEP), steps_end)
        for start in range(first, mixed_end, STEP):
            window, dtotals, dtaps, dbias = _backward_step(
                dy, x, seq_idx, dx, first, start, positions, channels, dy_position, x_position, inside,
                window, dtotals, taps, added, dtaps, dbias, WIDTH, SILU, True, STEP,
            )  # fmt: skip
    for start in tl.range(mixed_end, steps_end, STEP, num_stages=STAGES):
        window, dtotals, dtaps, dbias = _backward_step(
            dy, x, seq_idx, dx, first, start, positions, channels, dy_position, x_position, inside,
            window, dtotals, taps, added, dtaps, dbias, WIDTH, SILU, seq_idx is not None, STEP,
        )  # fmt: skip
    for start in range(steps_end, end):
        window, dtotals, dtaps, dbias = _backward_step(
            dy, x, seq_idx, dx, first, start, positions, channels, dy_position, x_position, inside,
            window, dtotals, taps, added, dtaps, dbias, WIDTH, SILU, True, 1,
        )  # fmt: skip
    # The last W - 1 positions of the run went into sums after it too. Those belong to the next run, but for this.
    window = window + guarded(x, end, positions, x_position, inside, WIDTH - 1)
    upstream = guarded(dy, end, positions, dy_position, inside, WIDTH - 1)
    numbers = numbers_of(seq_idx, end - (WIDTH - 1), positions, 2 * (WIDTH - 1))
    gradients = gradients_of(
        upstream, window, numbers, dtotals, taps, added, dtaps, dbias, WIDTH, SILU, True, WIDTH - 1
    )[0]
    _store_gradients(dx, gradients, end - (WIDTH - 1), first, channels, inside, WIDTH - 1)
    # A row of its own for each program, added up by another kernel: atomics would add in a random order.
    partials += row * (WIDTH + 1) * channels + channel
    for back in tl.static_range(WIDTH):
        tl.store(partials + (WIDTH - 1 - back) * channels, dtaps[back], mask=inside)
    tl.store(partials + WIDTH * channels, dbias, mask=inside)


@triton.jit
def _backward_step(
    dy, x, seq_idx, dx, first, start, positions, channels, dy_position, x_position, inside,
    window, dtotals, taps, added, dtaps, dbias,
    WIDTH: tl.constexpr, SILU: tl.constexpr, MIXED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """``COUNT`` positions from ``start`` on. Returns all that the next step needs."""
    window = window + loaded(x, start, x_position, inside, COUNT)
    upstream = loaded(dy, start, dy_position, inside, COUNT)
    numbers = numbers_of(seq_idx, start - (WIDTH - 1), positions, WIDTH - 1 + COUNT)
    gradients, dtotals, dtaps, dbias = gradients_of(
        upstream, window, numbers, dtotals, taps, added, dtaps, dbias, WIDTH, SILU, MIXED, COUNT
    )
    _store_gradients(dx, gradients, start - (WIDTH - 1), first, channels, inside, COUNT)
    return window[COUNT:], dtotals, dtaps, dbias


@triton.jit
def _store_gradients(dx, gradients, start, first, channels, inside, COUNT: tl.constexpr):
    """Write those of ``COUNT`` positions from ``start`` on that are not before ``first``."""
    for step in tl.static_range(COUNT):
        at = dx + tl.cast(start + step, tl.int64) * channels
        tl.store(at, gradients[step].to(dx.dtype.element_ty), mask=inside & (start + step >= first))
