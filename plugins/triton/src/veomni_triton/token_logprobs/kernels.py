"""Device code of token_logprobs: a tile of logits folded into its tokens' sums, and turned into their gradient.

A tile holds the logits of all ``N`` tokens for ``W`` neighbouring words, as the matrix product wrote them: in the dtype
of hidden states, before scale, softcap and temperature. A program takes one token's row of the tile, ``COLUMNS`` words
at a time, in float32. A row's sums are added in one order, so results are the same in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.activations import tanh

# The rows of ``sums[SUMS, N]``. With m the largest logit so far and e = exp(z - m): TOTAL is the sum of e, WEIGHTED of
# e * (z - m), SQUARES of e * e, PLAIN of z. Sums of z - m keep the entropy exact where one word has nearly all
# probability; those of z would cancel there. BEFORE_LABEL is the largest logit among the words before the label.
LARGEST = tl.constexpr(0)
TOTAL = tl.constexpr(1)
WEIGHTED = tl.constexpr(2)
OF_LABEL = tl.constexpr(3)
SQUARES = tl.constexpr(4)
PLAIN = tl.constexpr(5)
BEFORE_LABEL = tl.constexpr(6)
SUMS = 7


@triton_kernel
def sums_kernel(
    logits,  # [N, W], contiguous
    labels,  # [N] int64 or int32; of the whole vocabulary
    temperatures,  # [N] float32, or None: then temperature counts
    sums,  # [SUMS, N] float32, read and written
    temperature,  # a number, as the next two
    scale,
    softcap,
    tokens,  # N
    words,  # W
    first_word,  # which word of the vocabulary the tile begins with
    CAPPED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    WITH_TOP1: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # N * W can exceed 2**31
    row = logits + token * words
    label = (tl.load(labels + token) - first_word).to(tl.int32)  # in the tile, if 0 <= label < words
    divisor = tl.load(temperatures + token) if temperatures is not None else temperature
    sum_of_token = sums + token
    largest = tl.load(sum_of_token + LARGEST * tokens)
    total = tl.load(sum_of_token + TOTAL * tokens)
    weighted = tl.load(sum_of_token + WEIGHTED * tokens)
    of_label = tl.load(sum_of_token + OF_LABEL * tokens)
    squares = tl.load(sum_of_token + SQUARES * tokens)
    plain = tl.load(sum_of_token + PLAIN * tokens)
    before_label = tl.load(sum_of_token + BEFORE_LABEL * tokens)
    for start in range(0, words, COLUMNS):
        word = start + tl.arange(0, COLUMNS)
        kept = word < words
        z, _ = _final_logits(tl.load(row + word, mask=kept, other=0.0).to(tl.float32), divisor, scale, softcap, CAPPED)
        of_label += tl.sum(tl.where(word == label, z, 0.0), 0)  # another word's tile adds 0
        if WITH_MEAN:
            plain += tl.sum(tl.where(kept, z, 0.0), 0)
        z = tl.where(kept, z, -float("inf"))
        if WITH_TOP1:
            before_label = tl.maximum(before_label, tl.max(tl.where(word < label, z, -float("inf")), 0))
        former = largest
        largest = tl.maximum(former, tl.max(z, 0))
        shift = former - largest
        rescale = tl.exp(shift)
        e = tl.exp(z - largest)
        if WITH_ENTROPY:
            # Words of earlier columns: with e' = rescale * e and z - m' = (z - m) + shift.
            weighted = rescale * (weighted + shift * total) + tl.sum(tl.where(kept, e * (z - largest), 0.0), 0)
        if WITH_SQUARES:
            squares = rescale * rescale * squares + tl.sum(e * e, 0)
        total = rescale * total + tl.sum(e, 0)
    tl.store(sum_of_token + LARGEST * tokens, largest)
    tl.store(sum_of_token + TOTAL * tokens, total)
    tl.store(sum_of_token + WEIGHTED * tokens, weighted)
    tl.store(sum_of_token + OF_LABEL * tokens, of_label)
    tl.store(sum_of_token + SQUARES * tokens, squares)
    tl.store(sum_of_token + PLAIN * tokens, plain)
    tl.store(sum_of_token + BEFORE_LABEL * tokens, before_label)


# As many words as a tile has, and however its rows begin in memory, this is one binary: how many words a thread reads
# at a time says in which order a row's are added.
sums_in_fixed_order_kernel = triton_kernel(
    sums_kernel.fn,
    do_not_specialize=["tokens", "words", "first_word"],
    do_not_specialize_on_alignment=["logits"],
)


@triton_kernel
def gradients_kernel(
    logits,  # [N, W], contiguous
    dlogits,  # [N, W], contiguous, written; may be logits itself
    labels,  # [N] int64 or int32; of the whole vocabulary
    temperatures,  # [N] float32, or None: then temperature counts
    log_normalizer,  # [N] float32: the logarithm of the sum of the exponentials of a token's logits
    entropy,  # [N] float32, or None where dentropy is
    dlogprobs,  # [N] float32, or None: the upstream gradient, 0 where the label is ignored
    dentropy,  # [N] float32, or None
    temperature,  # a number, as the next two
    scale,
    softcap,
    words,  # W
    first_word,  # which word of the vocabulary the tile begins with
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = word < words
    label = (tl.load(labels + token) - first_word).to(tl.int32)
    divisor = tl.load(temperatures + token) if temperatures is not None else temperature
    x = tl.load(logits + token * words + word, mask=kept, other=0.0).to(tl.float32)
    z, slope = _final_logits(x, divisor, scale, softcap, CAPPED)
    logprob = z - tl.load(log_normalizer + token)
    p = tl.exp(logprob)
    dz = tl.zeros_like(p)
    if dlogprobs is not None:
        dz = tl.load(dlogprobs + token) * tl.where(word == label, _one_minus_exp(logprob), -p)
    if dentropy is not None:
        dz -= tl.load(dentropy + token) * p * (logprob + tl.load(entropy + token))
    tl.store(dlogits + token * words + word, (dz * slope).to(dlogits.dtype.element_ty), mask=kept)


@triton.jit
def _final_logits(x, divisor, scale, softcap, CAPPED: tl.constexpr):
    """``softcap * tanh(scale * x / softcap) / divisor``, and its derivative by ``x``."""
    x = x * scale
    slope = scale / divisor
    if CAPPED:
        bounded = tanh(x / softcap)
        x = softcap * bounded
        slope = slope * (1.0 - bounded * bounded)
    return x / divisor, slope


@triton.jit
def _one_minus_exp(x):
    """``1 - exp(x)`` of ``x <= 0`` to float32's precision: above -0.1 the difference would cancel."""
    near = -x * (1.0 + x * (1.0 / 2.0 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
    return tl.where(x > -0.1, near, 1.0 - tl.exp(x))
