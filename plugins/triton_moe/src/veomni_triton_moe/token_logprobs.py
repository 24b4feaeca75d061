"""token_logprobs: tiles of logits from PyTorch's matrix product, and one pass of a Triton kernel over each.

Forward folds each tile into sums of its tokens. Backward needs the logits again, since the upstream gradients of the
tokens are not known before. The last tiles are kept for it, up to a number of bytes; the others are computed anew, each
in the place of the one before. A tile has all tokens, so the gradient of its words is one matrix product.

Shape suffixes: ``N`` tokens, ``H`` hidden width, ``V`` vocabulary, ``W`` words of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor, library
from torch.autograd import Function

from veomni_core.ops.autocast import product_operands, without_autocast
from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_core.ops.labels import IGNORED
from veomni_core.ops.token_logprobs import (
    ENTROPY,
    LOG_SUM_SQUARES,
    LOGPROBS,
    MEAN_LOGIT,
    TOP1,
    check_options,
)
from veomni_triton_moe.token_logprobs_kernels import (
    BEFORE_LABEL,
    LARGEST,
    OF_LABEL,
    PLAIN,
    SQUARES,
    SUMS,
    TOTAL,
    WEIGHTED,
    gradients_kernel,
    sums_kernel,
)

# A tile of 8192 tokens has as many words in bf16.
TILE_BYTES = 128 << 20
# No tile has fewer, however many tokens there are: a tile of 512 words is smaller than the hidden states themselves.
FEWEST_WORDS = 512
# Tiles have a multiple of these words. A tile of 5461 words, whose rows begin at odd addresses, makes each product of
# 12288 tokens several times slower than one of 5376.
ALIGNMENT = 256
# 16 words for each thread of 4 warps. On an H200, tiles of 8192 tokens and 16384 words: 3659 GB/s for the gradients, as
# 4096 words with 8 warps (3633), and more than 2048 words with 8 (3163).
COLUMNS, NUM_WARPS = 2048, 4


def causal(kept_mib: int) -> Callable[..., tuple[Tensor, ...]]:
    """The kernel.

    Args:
        kept_mib: how many MiB of logits are kept from forward to backward, instead of being computed again.
    """
    return partial(_causal, kept_bytes=kept_mib << 20)


def _causal(
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
    kept_bytes: int,
) -> tuple[Tensor, ...]:
    """Statistics of the words' distribution for each of ``hidden[N, H]``, as float32 ``[N]``; all five outputs.

    Logits are computed in the dtype of hidden and weight, or in autocast's, and the arithmetic after them in float32.
    ``logprobs`` and ``entropy`` have gradients of hidden, weight and bias.

    Raises:
        ValueError: an output is unknown, or the temperature not above 0.
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
    """
    check_options(outputs, temperature, labels)
    hidden, weight, bias = product_operands("triton", hidden=hidden, weight=weight, bias=bias)
    # Not for a forward without gradients: nothing would read them.
    learns = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (hidden, weight, bias))
    temperatures, number = (
        (temperature.float().contiguous(), 1.0) if isinstance(temperature, Tensor) else (None, temperature)
    )
    return _TokenLogprobs.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        bias,
        labels,
        temperatures,
        Arithmetic(number, 1.0 if scale is None else scale, softcap or 0.0),
        ignore_index,
        outputs,
        kept_bytes if learns else 0,
    )


@dataclass(frozen=True)
class Arithmetic:
    """What happens to a logit after the output projection; a softcap of 0 stands for none."""

    temperature: float
    scale: float
    softcap: float


class _TokenLogprobs(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperatures: Tensor | None,
        arithmetic: Arithmetic,
        ignore_index: int,
        outputs: tuple[str, ...],
        kept_bytes: int,
    ) -> tuple[Tensor, ...]:
        numbers = (arithmetic.temperature, arithmetic.scale, arithmetic.softcap)
        results, log_normalizer, entropy, kept = _forward(
            hidden, weight, bias, labels, temperatures, *numbers, ignore_index, list(outputs), kept_bytes
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, temperatures, log_normalizer, entropy, kept)
        ctx.numbers, ctx.ignore_index, ctx.outputs = numbers, ignore_index, outputs
        ctx.mark_non_differentiable(
            *(result for name, result in zip(outputs, results, strict=True) if name not in (LOGPROBS, ENTROPY))
        )
        return tuple(results)

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        given = dict(zip(ctx.outputs, upstream, strict=True))
        dlogprobs, dentropy = given.get(LOGPROBS), given.get(ENTROPY)
        if dlogprobs is None and dentropy is None:
            return (None,) * 9
        gradients = iter(
            _backward(
                dlogprobs, dentropy, *ctx.saved_tensors, *ctx.numbers, ctx.ignore_index, list(ctx.needs_input_grad[:3])
            )
        )
        return *(next(gradients) if wanted else None for wanted in ctx.needs_input_grad[:3]), *(None,) * 6


def _forward_operator(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    scale: float,
    softcap: float,
    ignore_index: int,
    outputs: Sequence[str],
    kept_bytes: int,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The results, and what backward needs: the log-normalizer, the entropy and the kept logits, each maybe empty."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    counts = labels != ignore_index
    targets = torch.where(counts, labels, 0)
    tiles = Tiles.of(hidden, vocabulary, kept_bytes)
    kept = hidden.new_empty(tiles.kept_elements)
    work = hidden.new_empty(tokens * (tiles.words if tiles.first_kept else 0))
    sums = torch.zeros(SUMS, tokens, dtype=torch.float32, device=hidden.device)
    sums[LARGEST.value].fill_(torch.finfo(torch.float32).min)
    sums[BEFORE_LABEL.value].fill_(-torch.inf)
    for words in tiles:
        logits = tiles.view(kept, words) if words.start >= tiles.first_kept else _matrix(work, tokens, words)
        _project(hidden, weight[words], None if bias is None else bias[words], logits)
        with torch.cuda.device_of(logits):
            if tokens:
                sums_kernel[tokens,](
                    logits,
                    targets,
                    temperatures,
                    sums,
                    temperature,
                    scale,
                    softcap,
                    tokens,
                    logits.shape[1],
                    words.start,
                    CAPPED=softcap > 0,
                    WITH_ENTROPY=ENTROPY in outputs,
                    WITH_SQUARES=LOG_SUM_SQUARES in outputs,
                    WITH_MEAN=MEAN_LOGIT in outputs,
                    WITH_TOP1=TOP1 in outputs,
                    COLUMNS=COLUMNS,
                    num_warps=NUM_WARPS,
                )
    statistics = _Statistics(sums, vocabulary)
    results = [torch.where(counts, statistics.of(name), 0.0) for name in outputs]
    entropy = statistics.of(ENTROPY) if ENTROPY in outputs else sums.new_empty(0)
    return results, statistics.log_normalizer(), entropy, kept


def _backward_operator(
    dlogprobs: Tensor | None,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperatures: Tensor | None,
    log_normalizer: Tensor,
    entropy: Tensor,
    kept: Tensor,
    temperature: float,
    scale: float,
    softcap: float,
    ignore_index: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of hidden, weight and bias that are ``wanted``, in this order."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    labels = labels.contiguous()
    counts = labels != ignore_index
    dlogprobs, dentropy = (
        None if each is None else torch.where(counts, each, 0.0).contiguous() for each in (dlogprobs, dentropy)
    )
    tiles = Tiles.of(hidden, vocabulary, kept.numel() * kept.element_size())
    work = hidden.new_empty(tokens * tiles.words)
    dhidden = (
        torch.zeros_like(hidden, dtype=torch.float32, memory_format=torch.contiguous_format) if wanted[0] else None
    )
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if wanted[2] and bias is not None else None
    for words in tiles:
        dlogits = _matrix(work, tokens, words)
        if words.start >= tiles.first_kept:
            logits = tiles.view(kept, words)  # not overwritten: another backward of this graph reads it again
        else:
            logits = dlogits
            _project(hidden, weight[words], None if bias is None else bias[words], logits)
        with torch.cuda.device_of(logits):
            if tokens:
                gradients_kernel[tokens, triton.cdiv(logits.shape[1], COLUMNS)](
                    logits,
                    dlogits,
                    labels,
                    temperatures,
                    log_normalizer,
                    None if dentropy is None else entropy,
                    dlogprobs,
                    dentropy,
                    temperature,
                    scale,
                    softcap,
                    logits.shape[1],
                    words.start,
                    CAPPED=softcap > 0,
                    COLUMNS=COLUMNS,
                    num_warps=NUM_WARPS,
                )
        if dhidden is not None:
            _add_product(dhidden, dlogits, weight[words])
        if dweight is not None:
            torch.mm(dlogits.t(), hidden, out=dweight[words])
        if dbias is not None:
            dbias[words] = dlogits.sum(0, dtype=torch.float32)
    gradients = (None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias)
    return [each for each in gradients if each is not None]


@dataclass(frozen=True)
class Tiles:
    """How a vocabulary is cut into tiles of ``words``, of which those from the word ``first_kept`` on are kept."""

    tokens: int
    vocabulary: int
    words: int
    first_kept: int

    @classmethod
    def of(cls, hidden: Tensor, vocabulary: int, kept_bytes: int) -> Tiles:
        """The same in forward and backward, where ``kept_bytes`` are those that were kept."""
        bytes_per_word = max(1, hidden.shape[0]) * hidden.element_size()
        words = min(vocabulary, max(FEWEST_WORDS, TILE_BYTES // bytes_per_word // ALIGNMENT * ALIGNMENT))
        # The last tile may be smaller; the word that is kept first begins a tile.
        first_kept = max(0, -(-(vocabulary - kept_bytes // bytes_per_word) // words) * words)
        return cls(hidden.shape[0], vocabulary, words, min(first_kept, vocabulary))

    @property
    def kept_elements(self) -> int:
        """The number of logits of all tiles that are kept."""
        return self.tokens * (self.vocabulary - self.first_kept)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.vocabulary, self.words):
            yield slice(start, min(start + self.words, self.vocabulary))

    def view(self, kept: Tensor, words: slice) -> Tensor:
        """The tile ``[N, W]`` of ``words`` among the kept ones, which lie one after the other."""
        return _matrix(kept[self.tokens * (words.start - self.first_kept) :], self.tokens, words)


class _Statistics:
    """The outputs ``[N]`` of the finished ``sums[SUMS, N]``."""

    def __init__(self, sums: Tensor, vocabulary: int) -> None:
        self._sums, self._vocabulary = sums, vocabulary

    def log_normalizer(self) -> Tensor:
        return self._sums[LARGEST.value] + self._sums[TOTAL.value].log()

    def of(self, name: str) -> Tensor:
        largest, total, of_label = (self._sums[row.value] for row in (LARGEST, TOTAL, OF_LABEL))
        if name == LOGPROBS:
            return (of_label - largest) - total.log()
        if name == ENTROPY:
            return total.log() - self._sums[WEIGHTED.value] / total
        if name == LOG_SUM_SQUARES:
            return self._sums[SQUARES.value].log() - 2 * total.log()
        if name == MEAN_LOGIT:
            return self._sums[PLAIN.value] / self._vocabulary
        return ((of_label >= largest) & (of_label > self._sums[BEFORE_LABEL.value])).float()


def _matrix(elements: Tensor, tokens: int, words: slice) -> Tensor:
    """The first of ``elements`` as a tile ``[N, W]``."""
    width = words.stop - words.start
    return elements[: tokens * width].view(tokens, width)


def _project(hidden: Tensor, weight_WH: Tensor, bias_W: Tensor | None, logits_NW: Tensor) -> None:
    """Write the output projection of some words into ``logits_NW``."""
    if bias_W is None:
        torch.mm(hidden, weight_WH.t(), out=logits_NW)
    else:
        torch.addmm(bias_W, hidden, weight_WH.t(), out=logits_NW)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with ``total`` in float32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # Triton's interpreter
        total.addmm_(a.float(), b.float())


# Operators, so that ``torch.compile`` doesn't trace into them. Defined through a ``Library`` rather than by
# ``custom_op``, which puts more Python around each call.
_LIBRARY = library.Library("veomni_triton_moe", "FRAGMENT")
_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? temperatures"
_NUMBERS = "float temperature, float scale, float softcap, int ignore_index"
_LIBRARY.define(
    f"token_logprobs_forward({_OPERANDS}, {_NUMBERS}, str[] outputs, int kept_bytes)"
    " -> (Tensor[] results, Tensor log_normalizer, Tensor entropy, Tensor kept)"
)
_LIBRARY.define(
    f"token_logprobs_backward(Tensor? dlogprobs, Tensor? dentropy, {_OPERANDS}, Tensor log_normalizer, Tensor entropy,"
    f" Tensor kept, {_NUMBERS}, bool[] wanted) -> Tensor[]"
)


def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperatures: Tensor | None, *rest: Any
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    outputs, kept_bytes = rest[-2:]
    per_token = [hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(len(outputs) + 2)]
    entropy = per_token[-1] if ENTROPY in outputs else per_token[-1].new_empty(0)
    kept = hidden.new_empty(Tiles.of(hidden, weight.shape[0], kept_bytes).kept_elements)
    return per_token[:-2], per_token[-2], entropy, kept


def _backward_fake(
    dlogprobs: Tensor | None, dentropy: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    wanted: Sequence[bool] = rest[-1]
    return [
        torch.empty_like(each, memory_format=torch.contiguous_format)
        for each, is_wanted in zip((hidden, weight, bias), wanted, strict=True)
        if is_wanted and each is not None
    ]


for _name, _implementation, _fake in (
    ("token_logprobs_forward", _forward_operator, _forward_fake),
    ("token_logprobs_backward", _backward_operator, _backward_fake),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.register_fake(f"veomni_triton_moe::{_name}", _fake, lib=_LIBRARY)
_forward = torch.ops.veomni_triton_moe.token_logprobs_forward.default
_backward = torch.ops.veomni_triton_moe.token_logprobs_backward.default
