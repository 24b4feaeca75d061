"""cross_entropy_loss: the loss of a language model's head, or of a sequence classifier, as a float32 scalar.

``causal`` takes hidden states and the output projection's weight, so that a kernel can avoid materialising all logits.
A site's ``sizes`` are then ``hidden`` and ``vocabulary``. ``vocabulary_parallel`` is one rank's part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import IGNORED
from veomni_ops.combinations import (
    CONTIGUOUS,
    EVERY_OTHER,
    LAYOUTS,
    LEARNED,
    head_problem,
    head_samples,
    laid_out,
    learned_tokens,
    together,
)
from veomni_ops.contract import Alike, Contract, Draw, Sample, compute_dtype, leaf, tolerances
from veomni_ops.vocabulary_parallel_loss import CONTRACT as VOCABULARY_PARALLEL


def causal(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    num_items_in_batch: int | Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Mean cross entropy of ``hidden[T, H] @ weight[V, H].T`` against ``labels[T]``. If all are ignored, it is 0.

    Args:
        hidden: hidden states ``[T, H]``.
        weight: the output projection ``[V, H]``.
        labels: int64 or int32 ``[T]``, already shifted.
        bias: the projection's bias ``[V]``.
        ignore_index: the label that doesn't count.
        num_items_in_batch: divide the sum by this instead of by the number of labels that count.
        softcap: bounds the logits, after ``scale``: ``softcap * tanh(logits / softcap)``.
        scale: multiplies the logits.

    Returns:
        A scalar, in float32 (float64 for float64 inputs).

    Example:
        >>> hidden, weight = torch.zeros(3, 8), torch.randn(16, 8)  # equal logits: each label costs log(16)
        >>> labels = torch.tensor([5, 0, -100])
        >>> causal(hidden, weight, labels)
        tensor(2.7726)
        >>> causal(hidden, weight, labels, num_items_in_batch=4)  # two more in the other micro-batch
        tensor(1.3863)
        >>> causal(hidden, weight, torch.full((3,), -100))
        tensor(0.)
    """
    logits = F.linear(hidden, weight, bias)
    if scale is not None:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    total = _sum_of_losses(logits, labels, ignore_index)
    if num_items_in_batch is not None:
        return total / num_items_in_batch
    return total / (labels != ignore_index).sum().clamp_min(1)


def seq_cls(logits: Tensor, labels: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Mean cross entropy of pooled ``logits[B, C]`` against ``labels[B]``; 0 if all labels are ignored.

    Args:
        logits: ``[B, C]``, of any floating dtype.
        labels: int64 or int32 ``[B]``.
        ignore_index: the label that doesn't count.

    Returns:
        A scalar, in float32 (float64 for float64 inputs).

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
        >>> seq_cls(logits, torch.tensor([0, 1, -100]))
        tensor(0.1269)
        >>> seq_cls(logits, torch.tensor([0, 1, 0]))
        tensor(0.7936)
    """
    return _sum_of_losses(logits, labels, ignore_index) / (labels != ignore_index).sum().clamp_min(1)


def _sum_of_losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    wide = logits.to(compute_dtype(logits))
    return F.cross_entropy(wide, labels.long(), ignore_index=ignore_index, reduction="sum")


def _causal_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    problem = partial(head_problem, draw)
    yield Sample("odd sizes", problem(37, 48, 101, ignored=5))
    yield Sample("bias", (*problem(19, 32, 67), leaf(draw.normal(67))))
    yield Sample("items counted over several batches", problem(16, 32, 64, ignored=3), {"num_items_in_batch": 29})
    items = torch.tensor(29, device=device)
    yield Sample("items counted in a tensor", problem(16, 32, 64, ignored=3), {"num_items_in_batch": items})
    yield Sample("softcap and scale", problem(21, 32, 80, scale=4.0), {"softcap": 5.0, "scale": 0.5})
    yield Sample("large logits", problem(12, 64, 96, scale=20.0))
    yield Sample("another ignore_index", problem(12, 32, 50), {"ignore_index": 7})
    yield Sample("no label counts", problem(9, 32, 50, ignored=9))
    yield Sample("many tokens, most of them masked", _masked(problem(321, 16, 65, ignored=150)))
    hidden, weight, labels = problem(24, 32, 50)
    yield Sample("every other token", (leaf(hidden.detach()[::2]), weight, labels[::2]))
    yield from _causal_edges(device, dtype)


def _causal_edges(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Options alone and combined, and extreme counts: no token, one token, all labels ignored."""
    draw = Draw(device, dtype, seed=3)

    def edge(name: str, problem: tuple[Tensor, ...], **options: Any) -> Sample:
        return Sample(name, problem, options, values_only=True)

    def problem(tokens: int = 16, ignored: int = 3) -> tuple[Tensor, ...]:
        return _problem(draw, tokens, 32, 64, ignored)

    def biased(ignored: int = 3) -> tuple[Tensor, ...]:
        return *problem(ignored=ignored), leaf(draw.normal(64))

    # Shapes of earlier samples with another number of ignored labels: finds kernels that cache something by shape.
    yield edge("softcap alone", problem(), softcap=2.0)
    yield edge("scale alone", problem(ignored=7), scale=0.25)
    yield edge("bias, ignored labels", biased())
    yield edge("bias, softcap and scale", biased(), softcap=3.0, scale=0.5)
    yield edge("bias, items counted", biased(), num_items_in_batch=29, softcap=3.0)
    yield edge("fewer items than labels", problem(), num_items_in_batch=5)
    # Each option beside each other one, mostly without the rest.
    yield edge(
        "other items in a tensor, and scale", problem(), num_items_in_batch=torch.tensor(11, device=device), scale=2.0
    )
    floats = torch.tensor(21.0, device=device)
    yield edge("items in a tensor of floats, and softcap", problem(), num_items_in_batch=floats, softcap=3.0)
    yield edge("no label counts, items counted", problem(ignored=16), num_items_in_batch=29)
    yield edge("one token", problem(tokens=1, ignored=0))
    yield edge("no tokens", problem(tokens=0, ignored=0))
    hidden, weight, labels, bias = biased(ignored=0)
    labels[::3], labels[1], labels[-1] = 0, 63, 63
    yield edge("the first word is ignored, and scale", (hidden, weight, labels, bias), ignore_index=0, scale=0.5)
    yield edge("the last word is ignored", (hidden, weight, labels), ignore_index=63, num_items_in_batch=29)
    labels = labels.clone()
    labels[::3] = -1
    yield edge("ignored below zero, and softcap", (hidden, weight, labels), ignore_index=-1, softcap=3.0)
    hidden, weight, labels, bias = biased()
    yield edge("labels of int32", (hidden, weight, labels.int()))
    labels[::4] = 7
    every = {"ignore_index": 7, "num_items_in_batch": 29, "softcap": 3.0, "scale": 0.5}
    labels = labels.clamp_min(0).int()
    yield edge("every option at once, labels of int32", (hidden, weight, labels, bias), **every)
    yield edge("a vocabulary of one", _problem(draw, 9, 32, 1, ignored=2))
    yield edge("a width of one", _problem(draw, 13, 1, 64, ignored=2))


def _causal_beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield Sample("past 4096 words", _problem(draw, tokens=65, hidden=72, vocabulary=5003, ignored=13))
    options = {"softcap": 5.0, "scale": 0.5, "num_items_in_batch": 29}
    yield Sample("8192 words, softcap", _problem(draw, tokens=19, hidden=40, vocabulary=8192), options)
    yield Sample("one word past 4096", _problem(draw, tokens=9, hidden=16, vocabulary=4097))
    yield Sample("a long prompt", _masked(_problem(draw, tokens=1217, hidden=16, vocabulary=40, ignored=1090)))
    yield _scaled(Sample("4096 tokens, all learned", _problem(draw, tokens=4096, hidden=8, vocabulary=33)))
    yield Sample("one token past 2048", _problem(draw, tokens=2049, hidden=8, vocabulary=33, ignored=2040))
    yield Sample("5120 words", _problem(draw, tokens=9, hidden=136, vocabulary=5120))

    def make(
        tokens: int,
        hidden: int,
        words: int,
        learned: str,
        bias: bool,
        items: str,
        softcap: float | None,
        ignored: int,
        scale: float | None,
        labels: torch.dtype,
        layout: str,
    ) -> Sample:
        states, weight, words_at = _problem(draw, tokens, hidden, words)
        options: dict[str, Any] = {"ignore_index": ignored, "softcap": softcap, "scale": scale}
        if items != "none":
            options["num_items_in_batch"] = 150 if items == "a number" else torch.tensor(150, device=device)
        own = words_at.masked_fill(~learned_tokens(learned, tokens, device), ignored).to(labels)
        biases = [leaf(draw.normal(words))] if bias else []
        return Sample("", (laid_out(states.detach(), layout), weight, own, *biases), options)

    shapes = {"tokens": (7, 65, 193), "hidden": (32, 80, 192), "words": (50, 192, 320), "learned": LEARNED}
    numbers = {"softcap": (None, 2.0, 30.0), "ignored": (IGNORED, 7), "scale": (None, 0.5)}
    kinds = {"labels": (torch.int64, torch.int32), "layout": (CONTIGUOUS, EVERY_OTHER)}
    yield from together(make, **shapes, bias=(False, True), items=("none", "a number", "a tensor"), **numbers, **kinds)
    yield Sample("9001 words", _problem(draw, tokens=5, hidden=8, vocabulary=9001))
    yield _scaled(Sample("4200 tokens", _masked(_problem(draw, tokens=4200, hidden=8, vocabulary=17))))
    draw = Draw(device, dtype, seed=8)
    hidden, weight, labels = _problem(draw, tokens=4, hidden=8, vocabulary=262_208)
    labels[-1] = 262_207
    yield Sample("past 262144 words", (hidden, weight, labels))
    # Most of a word's gradient has one sign: a sum in 16 bits, token by token, stops to grow.
    _, weight, labels = _problem(draw, tokens=1024, hidden=2, vocabulary=1536)
    hidden = leaf(draw.normal(1024, 2, scale=0.25, shift=1.0))
    yield Sample("states of one sign", (hidden, weight, labels), {"num_items_in_batch": 4})
    yield from map(_scaled, head_samples(draw))
    hidden, weight, labels = _problem(draw, tokens=37, hidden=48, vocabulary=101, ignored=5)
    options = {"softcap": 2.0, "num_items_in_batch": 29}
    yield Sample("a frozen head, softcap and items", (hidden, weight.detach(), labels), options, values_only=True)
    # A kernel that divides by the items in forward, where it has the logits, loses these gradients in float16.
    items = {"num_items_in_batch": 2**20}
    yield Sample("a million items", _problem(draw, tokens=37, hidden=48, vocabulary=101), items, loss_scale=2.0**16)


def _causal_large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield _scaled(Sample("a model's head", _problem(draw, tokens=2051, hidden=1024, vocabulary=50_257, ignored=100)))
    yield _scaled(Sample("past 131072 words", _problem(draw, tokens=515, hidden=512, vocabulary=151_936)))
    yield _scaled(Sample("past 65535 tokens", _problem(draw, tokens=65_539, hidden=64, vocabulary=1009, ignored=9)))


def _problem(draw: Draw, tokens: int, hidden: int, vocabulary: int, ignored: int = 0) -> tuple[Tensor, ...]:
    labels = draw.integers(vocabulary, tokens)
    labels[:ignored] = IGNORED
    return leaf(draw.normal(tokens, hidden)), leaf(draw.normal(vocabulary, hidden, scale=hidden**-0.5)), labels


def _scaled(sample: Sample) -> Sample:
    """With the loss scaled up: a word's probability divided by many tokens underflows in float16."""
    return replace(sample, loss_scale=2.0**10)


def _masked(problem: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``problem`` with another turn and the last tokens masked too: no chunk of tokens is like another."""
    hidden, weight, labels = problem
    labels[-90:-60], labels[-5:] = IGNORED, IGNORED
    return hidden, weight, labels


def _seq_cls_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield Sample("odd sizes", (leaf(draw.normal(7, 5)), draw.integers(5, 7)))
    labels = draw.integers(3, 9)
    labels[2] = IGNORED
    yield Sample("an ignored label", (leaf(draw.normal(9, 3, scale=10.0)), labels))
    yield Sample("no label counts", (leaf(draw.normal(2, 3)), torch.full((2,), IGNORED, device=device)))
    labels = draw.integers(4, 8)
    labels[1::3] = 1
    yield Sample("another ignore_index", (leaf(draw.normal(8, 4)), labels), {"ignore_index": 1}, values_only=True)
    yield Sample("one row of two classes", (leaf(draw.normal(1, 2)), draw.integers(2, 1)), values_only=True)
    labels = draw.integers(6, 193).int()
    labels[:130], labels[-30:-20] = IGNORED, IGNORED
    yield Sample("many ignored labels, in int32", (leaf(draw.normal(193, 6)), labels), values_only=True)
    yield Sample("one class", (leaf(draw.normal(5, 1)), draw.integers(1, 5)), values_only=True)


def _seq_cls_beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield Sample("5120 classes", (leaf(draw.normal(3, 5120)), draw.integers(5120, 3)))

    def make(rows: int, classes: int, learned: str, ignored: int, labels: torch.dtype, layout: str) -> Sample:
        own = draw.integers(classes, rows).masked_fill(~learned_tokens(learned, rows, device), ignored).to(labels)
        return Sample("", (laid_out(draw.normal(rows, classes), layout), own), {"ignore_index": ignored})

    kinds = {"ignored": (IGNORED, 1), "labels": (torch.int64, torch.int32), "layout": LAYOUTS}
    yield from together(make, rows=(7, 65, 193), classes=(3, 64, 192), learned=LEARNED, **kinds)
    yield Sample("past 4096 classes", (leaf(draw.normal(7, 5003)), draw.integers(5003, 7)))
    yield Sample("8192 classes", (leaf(draw.normal(3, 8192)), draw.integers(8192, 3)))
    yield Sample("many rows", (leaf(draw.normal(1025, 9)), draw.integers(9, 1025)))


def _alike(sample: Sample, features: Collection[str]) -> Iterator[Alike]:
    """A token's own loss, which is the loss where no other label counts: among the others, and alone."""
    hidden, weight, labels, *bias = sample.args
    options = {**sample.kwargs, "num_items_in_batch": 1}
    ignored = options.get("ignore_index", IGNORED)
    counting = (labels != ignored).nonzero().flatten().tolist()
    for row in dict.fromkeys(counting[:1] + counting[-1:]):
        only = torch.full_like(labels, ignored)
        only[row] = labels[row]
        among = replace(sample, args=(hidden, weight, only, *bias), kwargs=options)
        own = (hidden.detach()[row : row + 1], weight, labels[row : row + 1], *bias)
        alone = replace(sample, args=own, kwargs=options)
        yield Alike(f"where token {row} is alone", (among, alone), (lambda y: y, lambda y: y))


# The loss is one float32 number, but in low precision every logit is rounded first. In bf16 the rounding error of a
# logit of 60 is up to an eighth, which changes probabilities, and so gradients, by about as much.
VALUES = tolerances(float32=(4e-6, 4e-6), bfloat16=(1e-2, 1e-2), float16=(2e-3, 2e-3))
GRADIENTS = tolerances(float32=(4e-5, 1e-5), bfloat16=(1.6e-1, 4e-2), float16=(2e-2, 5e-3))

CONTRACTS = {
    "causal": Contract(
        op_name="cross_entropy_loss",
        variant="causal",
        reference=causal,
        samples=_causal_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_causal_beyond_a_tile,
        large=_causal_large,
        alike=_alike,
    ),
    "seq_cls": Contract(
        op_name="cross_entropy_loss",
        variant="seq_cls",
        reference=seq_cls,
        samples=_seq_cls_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_seq_cls_beyond_a_tile,
    ),
    "vocabulary_parallel": VOCABULARY_PARALLEL,
}
