"""What kernels of attention do with a tile: of queries and keys, and of weights.

Shape legend, here and in the kernels: ``M`` queries of a tile (of one head, or of all heads of a key head), ``N`` keys
of a tile, ``H`` heads of a key head, ``D`` columns of keys and ``V`` of values, padded to powers of two. Keys of other
widths have ``E`` columns more, if ``SPLIT``: 192 are 128 and 64.

Norms are logarithms of sums, to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

SUMS = tl.constexpr(16)  # columns: a matrix unit has no fewer


@triton.jit
def load(x, row_M, is_row_M, width, C: tl.constexpr, FIRST: tl.constexpr = 0, stride=None):
    """``[M, C]`` of rows of ``width`` numbers, ``stride`` or else as many apart, from the column ``FIRST`` on.

    Zeros where none is.
    """
    column_C = FIRST + tl.arange(0, C)
    inside_MC = is_row_M[:, None] & (column_C < width)[None, :]
    begin_M = row_M.to(tl.int64) * (width if stride is None else stride)
    return tl.load(x + (begin_M[:, None] + column_C[None, :]), mask=inside_MC, other=0.0)


@triton.jit
def store(x, tile_MC, row_M, is_row_M, width, C: tl.constexpr, FIRST: tl.constexpr = 0):
    column_C = FIRST + tl.arange(0, C)
    inside_MC = is_row_M[:, None] & (column_C < width)[None, :]
    place_MC = x + (row_M.to(tl.int64)[:, None] * width + column_C[None, :])
    tl.store(place_MC, tile_MC.to(x.dtype.element_ty), mask=inside_MC)


@triton.jit
def load_wide(x, row_M, is_row_M, width, D: tl.constexpr, E: tl.constexpr, SPLIT: tl.constexpr, stride=None):
    """Rows of queries or keys, in two parts; if not ``SPLIT``, the second is not read."""
    x_MD = load(x, row_M, is_row_M, width, D, 0, stride)
    x_ME = load(x, row_M, is_row_M, width, E, D, stride) if SPLIT else x_MD
    return x_MD, x_ME


@triton.jit
def store_wide(x, x_MD, x_ME, row_M, is_row_M, width, D: tl.constexpr, E: tl.constexpr, SPLIT: tl.constexpr):
    store(x, x_MD, row_M, is_row_M, width, D)
    if SPLIT:
        store(x, x_ME, row_M, is_row_M, width, E, D)


@triton.jit
def products(x_MD, x_ME, y_ND, y_NE, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """``[M, N]``: each row of ``x`` times each of ``y``."""
    product_MN = tl.dot(x_MD, tl.trans(y_ND), input_precision=PRECISION)
    if SPLIT:
        product_MN = tl.dot(x_ME, tl.trans(y_NE), product_MN, input_precision=PRECISION)
    return product_MN


@triton.jit
def add_rows(sum_MD, sum_ME, weight_MN, y_ND, y_NE, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """The sums with rows of ``y`` more, times weights."""
    sum_MD = tl.dot(weight_MN, y_ND, sum_MD, input_precision=PRECISION)
    if SPLIT:
        sum_ME = tl.dot(weight_MN, y_NE, sum_ME, input_precision=PRECISION)
    return sum_MD, sum_ME


@triton.jit
def upstream(gates, norms, means, row_M, is_row_M):
    """Of a branch ``[M]``: its gates and norms, and the means of its weights' gradients."""
    gate_M = tl.load(gates + row_M * 3, mask=is_row_M, other=0.0).to(tl.float32)
    norm_M = tl.load(norms + row_M, mask=is_row_M, other=float("inf"))
    return gate_M, norm_M, tl.load(means + row_M, mask=is_row_M, other=0.0)


@triton.jit
def attend(
    score_MN, scale, shift_MN, value_NV, highest_M, sum_MS, output_MV, SHIFTED: tl.constexpr, PRECISION: tl.constexpr
):
    """The running highest score, the sum in each of :data:`SUMS` columns, and the output, with a tile of keys more.

    Scores to base 2 are ``score * scale + shift``, of keys that aren't seen ``-inf``. If not ``SHIFTED``, ``shift`` is
    not read, and ``scale`` is above 0.
    """
    # Rounding keeps an order: the highest score times the scale is the highest one rounded.
    top_M = tl.max(tl.fma(score_MN, scale, shift_MN), 1) if SHIFTED else tl.max(score_MN, 1) * scale
    further_M = tl.maximum(highest_M, top_M)
    finite_M = tl.where(further_M == float("-inf"), 0.0, further_M)
    lower_MN = shift_MN - finite_M[:, None] if SHIFTED else -finite_M[:, None]
    weight_MN = tl.exp2(tl.fma(score_MN, scale, lower_MN))
    shrink_M = tl.exp2(highest_M - finite_M)
    weight_MN = weight_MN.to(value_NV.dtype)
    # Matrix units add up weights in one order. `tl.sum` takes the order of the threads that hold them, which is another
    # where a mask is read, and costs an instruction for each.
    one_NS = tl.full([value_NV.shape[0], SUMS], 1.0, tl.float32).to(value_NV.dtype)
    sum_MS = tl.dot(weight_MN, one_NS, sum_MS * shrink_M[:, None], input_precision=PRECISION)
    output_MV = tl.dot(weight_MN, value_NV, output_MV * shrink_M[:, None], input_precision=PRECISION)
    return further_M, sum_MS, output_MV


@triton.jit
def finish(output, norms, highest_M, sum_MS, output_MV, row_M, is_row_M, width, V: tl.constexpr):
    """Write the output and the norms, of queries without a key zeros and ``inf``."""
    sum_M = tl.max(sum_MS, 1)  # all columns are alike
    is_empty_M = sum_M == 0.0
    sum_M = tl.where(is_empty_M, 1.0, sum_M)
    store(output, output_MV / sum_M[:, None], row_M, is_row_M, width, V)
    norm_M = tl.where(is_empty_M, float("inf"), highest_M + tl.log2(sum_M))
    tl.store(norms + row_M, norm_M, mask=is_row_M)


@triton.jit
def dlogits(logit_MN, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_MN, scaling, PRECISION: tl.constexpr):
    """The gradients of a tile's logits; ``upstream`` is that of all branches together."""
    weight_MN = tl.where(seen_MN, tl.exp2(logit_MN - norm_M[:, None]), 0.0)
    dweight_MN = tl.dot(upstream_MV, tl.trans(value_NV), input_precision=PRECISION) * gate_M[:, None]
    return tl.where(seen_MN, weight_MN * (dweight_MN - mean_M[:, None]) * scaling, 0.0)


@triton.jit
def weights_of_keys(
    logit_NM, value_NV, upstream_MV, gate_M, norm_M, mean_M, seen_NM, scaling, dvalue_NV, PRECISION: tl.constexpr
):
    """The gradients of a tile's logits, and those of its values with a tile of queries more."""
    weight_NM = tl.where(seen_NM, tl.exp2(logit_NM - norm_M[None, :]), 0.0)
    gated_NM = (weight_NM * gate_M[None, :]).to(upstream_MV.dtype)
    dvalue_NV = tl.dot(gated_NM, upstream_MV, dvalue_NV, input_precision=PRECISION)
    dweight_NM = tl.dot(value_NV, tl.trans(upstream_MV), input_precision=PRECISION) * gate_M[None, :]
    return tl.where(seen_NM, weight_NM * (dweight_NM - mean_M[None, :]) * scaling, 0.0), dvalue_NV
