"""What the kernels compute at one position, from a window of positions that is a tuple of blocks.

A block is one vector in float32, with an element for each lane of a program. What a lane is differs between the
kernels: nothing here depends on it. Positions are places in the tuple, known when the kernel is compiled, so that a
window stays in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_triton.activations import silu

# W = WIDTH taps. `window` holds x at neighbouring positions, and `numbers` the sequence that each belongs to, one
# scalar or block for each. Positions that don't exist have numbers of their own. Where MIXED is false, all numbers are
# the same, and none is read.


@triton.jit
def taps_of(weight, channel, channels, WIDTH: tl.constexpr):
    """``weight [C, W]`` of each lane's channel as a tuple in which ``taps[back]`` is for ``back`` positions earlier."""
    taps = ()
    for back in tl.static_range(WIDTH):
        at = weight + channel * WIDTH + (WIDTH - 1 - back)
        taps = taps + (tl.load(at, mask=channel < channels, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def bias_of(bias, channel, channels):
    """``bias [C]`` of each lane's channel; zeros if it is ``None``."""
    if bias is None:
        return tl.zeros(channel.shape, tl.float32)
    else:
        return tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def with_product(total, factor, value, numbers, THERE: tl.constexpr, HERE: tl.constexpr, MIXED: tl.constexpr):
    """``total + factor * value``, or ``total`` where ``THERE`` and ``HERE`` belong to different sequences."""
    # An explicit fma has the same bits whether its result is selected or not: left to the compiler, only a product that
    # is added right away would be fused.
    found = tl.fma(factor, value, total)
    # Selected, not multiplied with zero: a NaN of one sequence would reach the next.
    if MIXED:
        found = tl.where(numbers[THERE] == numbers[HERE], found, total)
    return found


@triton.jit
def convolved(window, numbers, taps, bias, NOW: tl.constexpr, WIDTH: tl.constexpr, MIXED: tl.constexpr):
    """The sum before the activation, at the position ``window[NOW]``."""
    total = bias
    for back in tl.static_range(WIDTH):
        total = with_product(total, taps[back], window[NOW - back], numbers, NOW - back, NOW, MIXED)
    return total


@triton.jit
def upstream_of_sum(dy, total, SILU: tl.constexpr):
    """The gradient of :func:`convolved`'s result, from that of the activation's."""
    if SILU:
        return dy * silu(total)[1]
    else:
        return dy


@triton.jit
def gradient_of_x(dtotals, numbers, taps, AT: tl.constexpr, WIDTH: tl.constexpr, MIXED: tl.constexpr):
    """The gradient of x at the position of ``dtotals[AT]``: it went into that sum and into W - 1 after it."""
    total = taps[0] * dtotals[AT]
    for ahead in tl.static_range(1, WIDTH):
        total = with_product(total, taps[ahead], dtotals[AT + ahead], numbers, AT + ahead, AT, MIXED)
    return total


@triton.jit
def with_position(dtaps, dbias, dtotal, window, numbers, NOW: tl.constexpr, WIDTH: tl.constexpr, MIXED: tl.constexpr):
    """The gradients of taps and bias, with what the sum at ``window[NOW]`` adds to them."""
    sums = ()
    for back in tl.static_range(WIDTH):
        sums = sums + (with_product(dtaps[back], dtotal, window[NOW - back], numbers, NOW - back, NOW, MIXED),)
    return sums, dbias + dtotal


@triton.jit
def results_of(
    window, numbers, taps, bias, WIDTH: tl.constexpr, SILU: tl.constexpr, MIXED: tl.constexpr, COUNT: tl.constexpr
):
    """The results at the last ``COUNT`` positions of a window, which begins W - 1 positions before them."""
    results = ()
    for step in tl.static_range(COUNT):
        total = convolved(window, numbers, taps, bias, WIDTH - 1 + step, WIDTH, MIXED)
        results = results + (silu(total)[0] if SILU else total,)
    return results


@triton.jit
def gradients_of(
    dy,
    window,
    numbers,
    dtotals,
    taps,
    bias,
    dtaps,
    dbias,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    MIXED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One step of backward: ``dy`` is of the last ``COUNT`` positions of a window, ``dtotals`` of the others.

    Returns the gradients of x at the first ``COUNT`` positions of the window, ``dtotals`` of its last W - 1, and the
    gradients of taps and bias with what the step adds to them.
    """
    gradients = ()
    for step in tl.static_range(COUNT):
        total = convolved(window, numbers, taps, bias, WIDTH - 1 + step, WIDTH, MIXED)
        dtotal = upstream_of_sum(dy[step], total, SILU)
        dtotals = dtotals + (dtotal,)
        dtaps, dbias = with_position(dtaps, dbias, dtotal, window, numbers, WIDTH - 1 + step, WIDTH, MIXED)
        # With this sum, all are known that the position W - 1 earlier went into.
        gradients = gradients + (gradient_of_x(dtotals, numbers, taps, step, WIDTH, MIXED),)
    return gradients, dtotals[COUNT:], dtaps, dbias
