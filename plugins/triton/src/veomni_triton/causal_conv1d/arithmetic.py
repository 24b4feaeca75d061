"""What the kernels compute at one position, from a window of positions that is a tuple of blocks.

A block is one vector in float32, with an element for each lane of a program. What a lane is differs between the
kernels: nothing here depends on it. Positions are places in the tuple, known when the kernel is compiled, so that a
window stays in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_triton.activations import silu

# W = WIDTH taps. `window` holds x at neighbouring positions, and `numbers` the sequence that each belongs to, one scalar
# or block for each. `numbers` isn't read where PACKED is false.


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
def convolved(window, numbers, taps, bias, NOW: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """The sum before the activation, at the position ``window[NOW]``."""
    total = bias + taps[0] * window[NOW]
    for back in tl.static_range(1, WIDTH):
        total += taps[back] * visible(window, numbers, NOW - back, NOW, PACKED)
    return total


@triton.jit
def upstream_of_sum(dy, total, SILU: tl.constexpr):
    """The gradient of :func:`convolved`'s result, from that of the activation's."""
    if SILU:
        _, slope = silu(total)
        return dy * slope
    else:
        return dy


@triton.jit
def gradient_of_x(dtotals, numbers, taps, AT: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """The gradient of x at the position of ``dtotals[AT]``: it was summed there and at W - 1 positions after it."""
    total = taps[0] * dtotals[AT]
    for ahead in tl.static_range(1, WIDTH):
        total += taps[ahead] * visible(dtotals, numbers, AT + ahead, AT, PACKED)
    return total


@triton.jit
def visible(window, numbers, THERE: tl.constexpr, HERE: tl.constexpr, PACKED: tl.constexpr):
    """``window[THERE]``, or zeros where it belongs to another sequence than the position ``HERE``."""
    # Selected, not multiplied with zero: a NaN of one sequence would reach the next.
    if PACKED:
        return tl.where(numbers[THERE] == numbers[HERE], window[THERE], 0.0)
    else:
        return window[THERE]
