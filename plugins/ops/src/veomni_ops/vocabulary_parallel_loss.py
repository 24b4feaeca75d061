"""One rank's part of a causal loss whose output projection is sharded over ranks by words.

The ranks' parts give the loss: with ``lse`` the log of the sum of ``exp(log_sum_exp)`` over all ranks, a token costs
``lse`` minus the sum of ``label_logit``. A kernel communicates nothing, so that one process can check it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import IGNORED
from veomni_ops.contract import Contract, Draw, Sample, compute_dtype, leaf, tolerances


def vocabulary_parallel(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    first_word: int,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What the words ``first_word, first_word + 1, ...`` of ``weight[Vs, H]`` contribute to the loss of ``labels[T]``.

    Both results are 0 for a token whose label is ignored, and nothing of that token reaches a gradient.

    Args:
        hidden: hidden states ``[T, H]``.
        weight: the shard of the output projection ``[Vs, H]``, with at least one word.
        labels: int64 or int32 ``[T]``, already shifted: words of the whole vocabulary.
        first_word: the word of the shard's first row.
        bias: the shard of the projection's bias ``[Vs]``.
        ignore_index: the label that doesn't count.
        softcap: bounds the logits, after ``scale``: ``softcap * tanh(logits / softcap)``.
        scale: multiplies the logits.

    Returns:
        ``log_sum_exp[T]`` of the token's logits for the shard's words, and ``label_logit[T]``, the logit of the label,
        or 0 if the label is in another shard. In float32 (float64 for float64 inputs).

    Example:
        >>> hidden, weight = torch.zeros(3, 8), torch.randn(16, 8)
        >>> labels = torch.tensor([5, 20, -100])
        >>> log_sum_exp, label_logit = vocabulary_parallel(hidden, weight, labels, first_word=0)
        >>> log_sum_exp, label_logit  # equal logits: log(16)
        (tensor([2.7726, 2.7726, 0.0000]), tensor([0., 0., 0.]))
        >>> bias = torch.arange(16.0)
        >>> vocabulary_parallel(hidden, weight, labels, first_word=16, bias=bias)[1]  # 20 is this shard's fifth word
        tensor([0., 4., 0.])
    """
    counts = labels != ignore_index
    logits = F.linear(hidden[counts], weight, bias)
    if scale is not None:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(compute_dtype(logits))
    words = labels[counts].long() - first_word
    here = (words >= 0) & (words < weight.shape[0])
    picked = logits.gather(1, torch.where(here, words, 0).unsqueeze(1)).squeeze(1)
    zeros = logits.new_zeros(labels.shape)
    parts = torch.logsumexp(logits, dim=1), torch.where(here, picked, 0.0)
    return zeros.masked_scatter(counts, parts[0]), zeros.masked_scatter(counts, parts[1])


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)

    def sample(name: str, problem: tuple[Any, ...], *, values_only: bool = False, **options: Any) -> Sample:
        return Sample(name, problem, options, values_only=values_only)

    yield sample("odd sizes, the second of three shards", _problem(draw, 37, 33, 41, of=3, shard=1))
    yield sample("ignored labels", _problem(draw, 193, 48, 96, ignored=150))
    yield sample("softcap and scale", _problem(draw, 33, 32, 72, of=4, shard=2, ignored=3), softcap=5.0, scale=0.5)
    yield sample("a bias", (*_problem(draw, 29, 24, 55, shard=1, ignored=2), leaf(draw.normal(55))))
    hidden, weight, labels, first = _problem(draw, 40, 32, 64, shard=1)
    yield sample("strided hidden states", (leaf(hidden.detach()[::2]), weight, labels[::2], first))
    yield from _edges(draw)


def _edges(draw: Draw) -> Iterator[Sample]:
    def edge(name: str, problem: tuple[Any, ...], **options: Any) -> Sample:
        return Sample(name, problem, options, values_only=True)

    yield edge("large logits", _problem(draw, 19, 32, 50, shard=1, scale=8.0))
    yield edge("one word more in the shards before", (*_problem(draw, 16, 32, 40, shard=1)[:3], 41))
    yield edge("the whole vocabulary", _problem(draw, 16, 32, 64, of=1))
    yield edge("one word", _problem(draw, 9, 16, 1, of=5, shard=4))
    hidden, weight, labels, first = _problem(draw, 16, 32, 64, shard=1)
    yield edge("no label in this shard", (hidden, weight, labels % first, first))
    yield edge("all labels are ignored", (hidden, weight, torch.full_like(labels, IGNORED), first))
    yield edge("one token", _problem(draw, 1, 32, 64))
    yield edge("no tokens", _problem(draw, 0, 32, 64))
    labels = labels.clone()
    labels[::3], labels[1] = first, first + 63
    yield edge("the first word of the shard is ignored", (hidden, weight, labels, first), ignore_index=first)
    yield edge("softcap alone", _problem(draw, 16, 32, 64, ignored=2), softcap=2.0)
    yield edge("scale alone", _problem(draw, 16, 32, 64, ignored=7), scale=0.25)
    problem = (*_problem(draw, 16, 32, 64, shard=1), leaf(draw.normal(64)))
    yield edge("bias, softcap and scale", problem, softcap=3.0, scale=0.5)
    hidden, weight, labels, first, bias = problem
    labels = labels.clone().int()
    yield edge("labels of int32", (hidden, weight, labels, first))
    labels[::4] = first + 7
    every = {"ignore_index": first + 7, "softcap": 3.0, "scale": 0.5}
    yield edge("every option at once, labels of int32", (hidden, weight, labels, first, bias), **every)
    yield edge("a width of one", _problem(draw, 13, 1, 64, ignored=2))


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield Sample("past 4096 words", _problem(draw, 65, 72, 5003, shard=1, ignored=13))
    options = {"softcap": 5.0, "scale": 0.5}
    yield Sample("8192 words, softcap", _problem(draw, 19, 40, 8192, of=4, shard=3), options)
    yield Sample("one word past 4096", _problem(draw, 9, 16, 4097, shard=1))
    yield Sample("a long prompt", _problem(draw, 1217, 16, 40, shard=1, ignored=1100))
    yield Sample("4096 tokens, all learned", _problem(draw, 4096, 8, 33, shard=1))


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield Sample("a quarter of a model's head", _problem(draw, 2051, 1024, 37_984, of=4, shard=1, ignored=100))
    yield Sample("past 65535 tokens", _problem(draw, 65_539, 64, 1009, shard=1, ignored=9))


def _problem(
    draw: Draw, tokens: int, hidden: int, words: int, of: int = 2, shard: int = 0, ignored: int = 0, scale: float = 1.0
) -> tuple[Any, ...]:
    """Hidden states, the ``shard`` with that many ``words`` of a vocabulary ``of`` several, labels, its first word."""
    labels = draw.integers(of * words, tokens)
    labels[:ignored] = IGNORED
    weight = leaf(draw.normal(words, hidden, scale=scale * hidden**-0.5))
    return leaf(draw.normal(tokens, hidden)), weight, labels, shard * words


# Each logit is rounded in low precision, which changes the log of a sum less than the logits themselves.
VALUES = tolerances(float32=(4e-6, 4e-6), bfloat16=(3e-2, 1e-2), float16=(4e-3, 2e-3))
GRADIENTS = tolerances(float32=(4e-5, 1e-5), bfloat16=(1.6e-1, 4e-2), float16=(2e-2, 5e-3))

CONTRACT = Contract(
    op_name="cross_entropy_loss",
    variant="vocabulary_parallel",
    reference=vocabulary_parallel,
    samples=_samples,
    values=VALUES,
    gradients=GRADIENTS,
    beyond_a_tile=_beyond_a_tile,
    large=_large,
)
