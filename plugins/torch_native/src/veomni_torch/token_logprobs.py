"""Log-probabilities and entropies of tokens, from tiles of logits: never more than one tile exists.

Forward folds each tile into running sums of its tokens. Backward computes each tile again and turns it into the
gradient of its logits, since the upstream gradients of the tokens are not known before.

Shape suffixes: ``N`` tokens, ``H`` hidden width, ``V`` vocabulary; in a tile ``R`` tokens and ``W`` words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands, without_autocast
from veomni_ops.contract import compute_dtype
from veomni_ops.token_logprobs import (
    ENTROPY,
    LOG_SUM_SQUARES,
    LOGPROBS,
    MEAN_LOGIT,
    TOP1,
    check_options,
)
from veomni_torch.fixed_order import linear
from veomni_torch.logit_chunks import add_product

# Bytes of a tile in float32. A tile of 2048 tokens has as many words as chunk_loss holds tokens of a whole vocabulary.
_CPU_TILE_BYTES, _ACCELERATOR_TILE_BYTES = 32 << 20, 256 << 20
_MOST_ROWS = 4096
_FEWEST_WORDS = 128
_WORDS_IN_FIXED_ORDER = 4096  # of a tile whose sums must not depend on the number of tokens


def causal(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = IGNORED,
    outputs: tuple[str, ...] = (LOGPROBS,),
    *,
    in_fixed_order: bool = False,
) -> tuple[Tensor, ...]:
    """Statistics of the words' distribution for each of ``hidden[N, H]``, as float32 ``[N]``; all five outputs.

    Logits are computed in the dtype of hidden and weight, or in autocast's, and the arithmetic after them in float32.
    ``logprobs`` and ``entropy`` have gradients of hidden, weight and bias, which are summed in float32.

    Raises:
        ValueError: an output is unknown, or the temperature not above 0.
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
    """
    check_options(outputs, temperature, labels)
    hidden, weight, bias = product_operands("chunk_logprobs", hidden=hidden, weight=weight, bias=bias)
    arithmetic = _Arithmetic(softcap, scale, temperature)
    return _TokenLogprobs.apply(hidden, weight, bias, labels, ignore_index, arithmetic, outputs, in_fixed_order)  # type: ignore[no-any-return]


causal_in_fixed_order = partial(causal, in_fixed_order=True)


@dataclass(frozen=True)
class _Arithmetic:
    """What happens to a logit after the output projection; ``temperature`` is a number or ``[N]``."""

    softcap: float | None
    scale: float | None
    temperature: float | Tensor

    def applied(self, logits_RW: Tensor, rows: slice) -> tuple[Tensor, Tensor | float]:
        """The final logits in float32, and their derivative by the projection's."""
        z_RW, slope = logits_RW.to(compute_dtype(logits_RW)), cast("Tensor | float", 1.0)
        divisor: Any = self.temperature
        if isinstance(divisor, Tensor):
            divisor = divisor[rows].unsqueeze(1).to(z_RW.dtype)
        if self.scale is not None:
            z_RW, slope = z_RW * self.scale, self.scale
        if self.softcap is not None:
            bounded = torch.tanh(z_RW / self.softcap)
            z_RW, slope = self.softcap * bounded, (1.0 - bounded.square()) * slope
        return z_RW / divisor, slope / divisor


class _TokenLogprobs(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        arithmetic: _Arithmetic,
        outputs: tuple[str, ...],
        in_fixed_order: bool,
    ) -> tuple[Tensor, ...]:
        counts = labels != ignore_index
        sums = _Sums(torch.where(counts, labels, 0).long(), compute_dtype(hidden))
        product, most = (linear, _WORDS_IN_FIXED_ORDER) if in_fixed_order else (F.linear, None)
        for rows, words in _tiles(hidden.shape[0], weight.shape[0], hidden.device, most):
            logits = product(hidden[rows], weight[words], None if bias is None else bias[words])
            sums.add(arithmetic.applied(logits, rows)[0], rows, words.start, outputs)
        results = tuple(torch.where(counts, sums.result(name, weight.shape[0]), 0.0) for name in outputs)
        ctx.set_materialize_grads(False)
        # The temperature of each token is saved as a tensor, so that a write into it before backward is noticed.
        temperatures = arithmetic.temperature if isinstance(arithmetic.temperature, Tensor) else None
        saved = (sums.log_normalizer(), sums.result(ENTROPY, 1) if ENTROPY in outputs else None, temperatures)
        ctx.save_for_backward(hidden, weight, bias, labels, *saved)
        ctx.ignore_index, ctx.arithmetic, ctx.outputs, ctx.product = ignore_index, arithmetic, outputs, product
        ctx.mark_non_differentiable(*(results[i] for i, name in enumerate(outputs) if name not in (LOGPROBS, ENTROPY)))
        return results

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, labels, log_normalizer, entropy, _ = ctx.saved_tensors
        given = dict(zip(ctx.outputs, upstream, strict=True))
        counts = labels != ctx.ignore_index
        dlogprobs, dentropy = (_masked(given.get(name), counts) for name in (LOGPROBS, ENTROPY))
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if dlogprobs is None and dentropy is None:
            return (None,) * 8
        float_dtype = compute_dtype(hidden)
        dhidden = torch.zeros_like(hidden, dtype=float_dtype, memory_format=torch.contiguous_format)
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wants_weight else None
        dbias = torch.zeros_like(bias, dtype=float_dtype) if wants_bias else None
        total_WH: Any = None  # float32: the sum over all tokens of the gradient of one chunk of words
        for rows, words in _tiles(hidden.shape[0], weight.shape[0], hidden.device):
            # The product of forward: a vocabulary of one word has a probability of exactly 1 then, and no gradient.
            logits = ctx.product(hidden[rows], weight[words], None if bias is None else bias[words])
            z_RW, slope = ctx.arithmetic.applied(logits, rows)
            logprobs_RW = z_RW.sub_(log_normalizer[rows].unsqueeze(1))
            dz_RW = _gradient_of_logits(
                logprobs_RW,
                labels[rows].long() - words.start,
                None if dlogprobs is None else dlogprobs[rows].unsqueeze(1),
                None if dentropy is None else dentropy[rows].unsqueeze(1),
                None if entropy is None else entropy[rows].unsqueeze(1),
            )
            dlogits_RW = (dz_RW * slope).to(hidden.dtype)
            if wants_hidden:
                add_product(dhidden[rows], dlogits_RW, weight[words])
            if dbias is not None:
                dbias[words] += dlogits_RW.sum(0, dtype=float_dtype)
            if dweight is not None:
                if rows.start == 0:
                    total_WH = torch.zeros(
                        dlogits_RW.shape[1], hidden.shape[1], dtype=float_dtype, device=hidden.device
                    )
                add_product(total_WH, dlogits_RW.t(), hidden[rows])
                if rows.stop >= hidden.shape[0]:
                    dweight[words] = total_WH.to(weight.dtype)
        if dweight is not None and not hidden.shape[0]:
            dweight.zero_()
        return (
            dhidden.to(hidden.dtype) if wants_hidden else None,
            dweight,
            None if dbias is None else dbias.to(bias.dtype),
            *(None,) * 5,
        )


class _Sums:
    """Running sums over the words of every token, all ``[N]`` in float32.

    With ``m`` the largest logit so far and ``e = exp(z - m)``: ``total`` is the sum of ``e``, ``weighted`` of
    ``e * (z - m)``, ``squares`` of ``e * e``, ``plain`` of ``z``. Sums of ``z - m`` keep the entropy exact where one
    word has nearly all probability; those of ``z`` would cancel there.
    """

    def __init__(self, targets_N: Tensor, dtype: torch.dtype) -> None:
        self._targets = targets_N
        zeros = torch.zeros(targets_N.shape, dtype=dtype, device=targets_N.device)
        self.largest = torch.full_like(zeros, torch.finfo(dtype).min)
        self.of_label = zeros
        self.total, self.weighted, self.squares, self.plain = (zeros.clone() for _ in range(4))
        self.largest_before_label = torch.full_like(zeros, -torch.inf)

    def add(self, z_RW: Tensor, rows: slice, first_word: int, outputs: tuple[str, ...]) -> None:
        """Add the words of one tile; ``first_word`` is the tile's first."""
        local_R = self._targets[rows] - first_word
        inside_R = (local_R >= 0) & (local_R < z_RW.shape[1])
        of_label_R = z_RW.gather(1, local_R.clamp(0, z_RW.shape[1] - 1).unsqueeze(1)).squeeze(1)
        self.of_label[rows] = torch.where(inside_R, of_label_R, self.of_label[rows])
        if MEAN_LOGIT in outputs:
            self.plain[rows] += z_RW.sum(-1)
        if TOP1 in outputs:
            before_RW = torch.arange(z_RW.shape[1], device=z_RW.device) < local_R.unsqueeze(1)
            highest_R = z_RW.masked_fill(~before_RW, -torch.inf).amax(-1)
            self.largest_before_label[rows] = torch.maximum(self.largest_before_label[rows], highest_R)
        former_R = self.largest[rows]
        largest_R = torch.maximum(former_R, z_RW.amax(-1))
        shift_R = former_R - largest_R
        rescale_R = shift_R.exp()
        shifted_RW = z_RW - largest_R.unsqueeze(1)
        e_RW = shifted_RW.exp()
        if ENTROPY in outputs:
            # Words of earlier tiles: sum of e' * (z - m') with e' = rescale * e and z - m' = (z - m) + shift.
            earlier_R = rescale_R * (self.weighted[rows] + shift_R * self.total[rows])
            self.weighted[rows] = earlier_R + shifted_RW.mul_(e_RW).sum(-1)
        if LOG_SUM_SQUARES in outputs:
            self.squares[rows] = rescale_R.square() * self.squares[rows] + e_RW.square().sum(-1)
        self.total[rows] = rescale_R * self.total[rows] + e_RW.sum(-1)
        self.largest[rows] = largest_R

    def log_normalizer(self) -> Tensor:
        """The logarithm of the sum of the words' exponentials."""
        return self.largest + self.total.log()

    def result(self, name: str, vocabulary: int) -> Tensor:
        """One of the outputs, for every token."""
        if name == LOGPROBS:
            return (self.of_label - self.largest) - self.total.log()
        if name == ENTROPY:
            return self.total.log() - self.weighted / self.total
        if name == LOG_SUM_SQUARES:
            return self.squares.log() - 2 * self.total.log()
        if name == MEAN_LOGIT:
            return self.plain / vocabulary
        return ((self.of_label >= self.largest) & (self.of_label > self.largest_before_label)).to(self.total.dtype)


def _tiles(
    tokens: int, vocabulary: int, device: torch.device, words: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Tokens and words of each tile: all tokens of some words, before the next words; as many as there is room for."""
    budget = _CPU_TILE_BYTES if device.type == "cpu" else _ACCELERATOR_TILE_BYTES
    rows = max(1, min(tokens, _MOST_ROWS))
    words = words or max(_FEWEST_WORDS, budget // (4 * rows))
    for word in range(0, vocabulary, words):
        for row in range(0, tokens, rows):
            yield slice(row, row + rows), slice(word, min(word + words, vocabulary))


def _masked(upstream_N: Tensor | None, counts_N: Tensor) -> Tensor | None:
    return None if upstream_N is None else torch.where(counts_N, upstream_N, 0.0)


def _gradient_of_logits(
    logprobs_RW: Tensor,
    local_R: Tensor,
    dlogprobs_R1: Tensor | None,
    dentropy_R1: Tensor | None,
    entropy_R1: Tensor | None,
) -> Tensor:
    """The gradient of the final logits ``[R, W]``; ``local_R`` are the labels, counted from the tile's first word."""
    p_RW = logprobs_RW.exp()
    dz_RW = torch.zeros_like(p_RW) if dlogprobs_R1 is None else p_RW * -dlogprobs_R1
    if dlogprobs_R1 is not None:
        # 1 - p at the label, as expm1 of the log-probability, which is accurate where p is nearly 1.
        inside_R1 = ((local_R >= 0) & (local_R < p_RW.shape[1])).unsqueeze(1)
        label_R1 = local_R.clamp(0, p_RW.shape[1] - 1).unsqueeze(1)
        at_label = -torch.expm1(logprobs_RW.gather(1, label_R1)) * dlogprobs_R1
        dz_RW.scatter_(1, label_R1, torch.where(inside_R1, at_label, dz_RW.gather(1, label_R1)))
    if dentropy_R1 is not None:
        assert entropy_R1 is not None
        dz_RW -= dentropy_R1 * p_RW * (logprobs_RW + entropy_R1)
    return dz_RW
