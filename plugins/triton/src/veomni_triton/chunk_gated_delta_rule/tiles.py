"""What the kernels of the gated delta rule share: tiles of tokens, decays of a chunk, inverse norms.

Tokens of all rows of a batch are numbered through: token ``t`` of row ``b`` is ``b * S + t``. A chunk is some
neighbouring tokens of one sequence; where it has fewer than ``C``, the tile's other rows are zeros.

Shape legend: ``C`` tokens of a chunk, ``D`` a width, ``K`` key width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.delta_recurrence import NORM_EPS as _NORM_EPS

NORM_EPS = tl.constexpr(_NORM_EPS)
# Triton compiles a kernel anew for each alignment of a pointer, and for numbers that are 1 or multiples of 16. That
# pays for tiles of queries, keys and values, which are loaded 16 bytes at a time. It does not for one number a token.
NUMBERS = ("g_token", "g_head", "beta_token", "beta_head", "value_heads", "group")
ROWS_OF_NUMBERS = (
    *("g", "beta", "dg", "dbeta", "dg_known", "dbeta_known", "read_scale", "write_scale", "left", "chunks", "spans"),
)


@triton.jit
def indices(tiles, heads):
    """The tile of values, the head, and the chunk or sequence of this program.

    Their launch has one axis: its second and third take 65535 programs at most.
    """
    program = tl.program_id(0)
    return program % tiles, program // tiles % heads, program // tiles // heads


@triton.jit
def load_tile(x, first, count, stride, start, width, C: tl.constexpr, D: tl.constexpr):
    """Columns ``start`` to ``start + D`` of a chunk's tokens; ``x`` points to the head of token 0."""
    row_C, column_D = tl.arange(0, C), start + tl.arange(0, D)
    inside_CD = (row_C < count)[:, None] & (column_D < width)[None, :]
    return tl.load(x + (first + row_C).to(tl.int64)[:, None] * stride + column_D[None, :], mask=inside_CD, other=0.0)


@triton.jit
def store_tile(x, tile_CD, first, count, stride, start, width, C: tl.constexpr, D: tl.constexpr):
    """Write what :func:`load_tile` reads."""
    row_C, column_D = tl.arange(0, C), start + tl.arange(0, D)
    inside_CD = (row_C < count)[:, None] & (column_D < width)[None, :]
    place_CD = x + (first + row_C).to(tl.int64)[:, None] * stride + column_D[None, :]
    tl.store(place_CD, tile_CD.to(x.dtype.element_ty), mask=inside_CD)


@triton.jit
def load_numbers(x, first, count, stride, C: tl.constexpr):
    """One number for each token of a chunk, in float32."""
    row_C = tl.arange(0, C)
    return tl.load(x + (first + row_C).to(tl.int64) * stride, mask=row_C < count, other=0.0).to(tl.float32)


@triton.jit
def store_numbers(x, number_C, first, count, stride, C: tl.constexpr):
    """Write what :func:`load_numbers` reads."""
    row_C = tl.arange(0, C)
    tl.store(x + (first + row_C).to(tl.int64) * stride, number_C.to(x.dtype.element_ty), mask=row_C < count)


@triton.jit
def inverse_norms(x_CK, NORMED: tl.constexpr, C: tl.constexpr):
    """What queries or keys are multiplied by to have the norm 1, or ones if they keep theirs. ``[C]``"""
    if NORMED:
        wide_CK = x_CK.to(tl.float32)
        factor_C = tl.rsqrt(tl.sum(wide_CK * wide_CK, axis=1) + NORM_EPS)
    else:
        factor_C = tl.full([C], 1.0, tl.float32)
    return factor_C


@triton.jit
def decays(g_C, C: tl.constexpr):
    """The decays from before the chunk to each token, from each to the chunk's last, and from token ``j`` to ``i``.

    The last, ``[C, C]``, has zeros above the diagonal. Log-decays are cumulated in float64, and a sum is kept as two
    float32 numbers: the difference of two single ones would lose the small decays that come after a large one.
    """
    row_C = tl.arange(0, C)
    sum_C, total = _cumulated(g_C)
    high_C = sum_C.to(tl.float32)
    low_C = (sum_C - high_C.to(tl.float64)).to(tl.float32)
    between_CC = (high_C[:, None] - high_C[None, :]) + (low_C[:, None] - low_C[None, :])
    pairwise_CC = tl.exp(tl.where(row_C[:, None] >= row_C[None, :], between_CC, float("-inf")))
    return tl.exp(high_C), tl.exp((total - sum_C).to(tl.float32)), pairwise_CC


@triton.jit
def decays_of_ends(g_C):
    """The decays from before the chunk to each token, from each to the chunk's last, and over the chunk."""
    sum_C, total = _cumulated(g_C)
    return tl.exp(sum_C.to(tl.float32)), tl.exp((total - sum_C).to(tl.float32)), tl.exp(total.to(tl.float32))


@triton.jit
def _cumulated(g_C):
    """The log-decays up to each token, and all of them, in float64."""
    return tl.cumsum(g_C.to(tl.float64), axis=0), tl.sum(g_C.to(tl.float64), axis=0)
