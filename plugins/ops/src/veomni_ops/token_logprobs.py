"""token_logprobs: the log-probability of each token's label, and what policy losses read beside it, in float32.

Like the causal cross entropy it takes hidden states and the output projection's weight, so that a kernel can avoid
materialising all logits. A site's ``sizes`` are ``hidden`` and ``vocabulary``.

Shape suffixes: ``N`` tokens, ``H`` hidden width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import IGNORED
from veomni_ops import combinations
from veomni_ops.combinations import CONTIGUOUS, EVERY_OTHER, LEARNED, head_problem, laid_out, learned_tokens, together
from veomni_ops.contract import Contract, Draw, Sample, compute_dtype, leaf, tolerances

LOGPROBS, ENTROPY, TOP1, MEAN_LOGIT, LOG_SUM_SQUARES = "logprobs", "entropy", "top1", "mean_logit", "log_sum_squares"
OUTPUTS = (LOGPROBS, ENTROPY, TOP1, MEAN_LOGIT, LOG_SUM_SQUARES)
DIFFERENTIABLE = (LOGPROBS, ENTROPY)


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
) -> tuple[Tensor, ...]:
    """Statistics of the distribution over words that ``hidden[N, H] @ weight[V, H].T`` gives for each token.

    With the logits ``z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) / temperature`` and
    ``p = softmax(z)``, the outputs of a token are

    - ``logprobs``: ``log p[label]``;
    - ``entropy``: ``-sum(p * log p)``, in nats;
    - ``top1``: 1 if no word has a larger logit than the label, and no earlier word an equal one, else 0;
    - ``mean_logit``: the mean of ``z`` over the words;
    - ``log_sum_squares``: ``log(sum(p ** 2))``.

    Each is 0 where the label is ignored. ``logprobs`` and ``entropy`` have gradients of hidden, weight and bias, from
    any upstream ``[N]``. The others have none, and a kernel computes those that its spec's ``features`` name.

    Args:
        hidden: hidden states ``[N, H]``.
        weight: the output projection ``[V, H]``.
        labels: int64 or int32 ``[N]``, already shifted.
        bias: the projection's bias ``[V]``.
        temperature: what the logits are divided by, above 0: a number, or one of each token ``[N]`` in float32.
        softcap: bounds the logits, after ``scale`` and before ``temperature``.
        scale: multiplies the logits.
        ignore_index: the label that doesn't count.
        outputs: what to compute, of :data:`OUTPUTS`.

    Returns:
        A float32 tensor ``[N]`` per output, in the order of ``outputs`` (float64 for float64 inputs).

    Raises:
        ValueError: ``outputs`` or ``temperature`` can't be.

    Example:
        >>> hidden, weight = torch.zeros(3, 8), torch.randn(16, 8)  # equal logits: each word has 1/16
        >>> labels = torch.tensor([5, 0, -100])
        >>> causal(hidden, weight, labels, outputs=("logprobs", "entropy", "top1"))
        (tensor([-2.7726, -2.7726,  0.0000]), tensor([2.7726, 2.7726, 0.0000]), tensor([0., 1., 0.]))
    """
    check_options(outputs, temperature, labels)
    logits = F.linear(hidden, weight, bias)
    return of_logits(logits, labels, temperature, softcap, scale, ignore_index, outputs)


def of_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = IGNORED,
    outputs: tuple[str, ...] = (LOGPROBS,),
) -> tuple[Tensor, ...]:
    """As :func:`causal`, of logits ``[N, V]`` that exist already.

    Example:
        >>> of_logits(torch.tensor([[0.0, 2.0]]), torch.tensor([1]))
        (tensor([-0.1269]),)
    """
    logits = logits.to(compute_dtype(logits))
    if scale is not None:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature.unsqueeze(1).to(logits) if isinstance(temperature, Tensor) else temperature)
    counts = labels != ignore_index
    targets_N1 = torch.where(counts, labels, 0).long().unsqueeze(1)
    logprobs_NV = torch.log_softmax(logits, dim=-1)
    compute = {
        LOGPROBS: lambda: logprobs_NV.gather(1, targets_N1).squeeze(1),
        ENTROPY: lambda: -(logprobs_NV.exp() * logprobs_NV).sum(-1),
        TOP1: lambda: (logits.detach().argmax(-1) == targets_N1.squeeze(1)).to(logits.dtype),
        MEAN_LOGIT: lambda: logits.detach().mean(-1),
        LOG_SUM_SQUARES: lambda: torch.logsumexp(2 * logprobs_NV.detach(), dim=-1),
    }
    return tuple(torch.where(counts, compute[name](), 0.0) for name in outputs)


def check_options(outputs: tuple[str, ...], temperature: float | Tensor, labels: Tensor) -> None:
    """Check what a call of a kernel asks for. A kernel calls it first.

    The values of a tensor of temperatures are not read, since that would wait for the device.

    Raises:
        ValueError: ``outputs`` has an unknown name, or one twice; ``temperature`` is not above 0, or is a tensor that
            does not have one number per label.

    Example:
        >>> check_options(("logprobs", "entropy"), 0.7, torch.zeros(3))
        >>> check_options(("logprobs",), 0.0, torch.zeros(3))
        Traceback (most recent call last):
            ...
        ValueError: temperature is 0.0, expected a number above 0: logits are divided by it
    """
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown or len(set(outputs)) < len(outputs):
        raise ValueError(f"outputs is {outputs!r}, expected names of {', '.join(OUTPUTS)}, each once")
    if isinstance(temperature, Tensor):
        if temperature.shape != labels.shape:
            shapes = f"{tuple(temperature.shape)}, expected {tuple(labels.shape)}"
            raise ValueError(f"temperature has shape {shapes}: a number, or one for each label")
    elif not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected a number above 0: logits are divided by it")


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    problem = partial(head_problem, draw)
    both = {"outputs": (LOGPROBS, ENTROPY)}
    yield Sample("odd sizes", problem(37, 48, 101, ignored=5))
    yield Sample("entropy", problem(29, 40, 83, ignored=4), both)
    yield Sample("entropy alone", problem(13, 32, 61, ignored=2), {"outputs": (ENTROPY,)})
    yield Sample("bias", (*problem(19, 32, 67), leaf(draw.normal(67))), both)
    yield Sample("a low temperature", problem(21, 32, 80, ignored=3), {"temperature": 0.3, **both})
    yield Sample("a high temperature", problem(17, 32, 80), {"temperature": 9.0, **both})
    temperatures = draw.normal(23).float().exp()
    yield Sample("a temperature per token", problem(23, 32, 50, ignored=3), {"temperature": temperatures, **both})
    options = {"softcap": 5.0, "scale": 0.5, "temperature": 0.7, **both}
    yield Sample("softcap, scale and temperature", problem(21, 32, 80, scale=4.0), options)
    yield Sample("large logits", problem(12, 64, 96, scale=20.0))
    yield Sample("another ignore_index", problem(12, 32, 50), {"ignore_index": 7, **both})
    yield Sample("no label counts", problem(9, 32, 50, ignored=9), both)
    yield Sample("many tokens, most of them masked", problem(321, 16, 65, ignored=150), both)
    hidden, weight, labels = problem(24, 32, 50)
    yield Sample("every other token", (leaf(hidden.detach()[::2]), weight, labels[::2]), both)
    yield from _edges(device, dtype)


def _edges(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Options alone, extreme counts, and the outputs that only some kernels have."""
    draw = Draw(device, dtype, seed=3)

    def edge(name: str, problem: tuple[Tensor, ...], needs: tuple[str, ...] = (), **options: Any) -> Sample:
        return Sample(name, problem, options, needs, values_only=True)

    def problem(tokens: int = 16, ignored: int = 3) -> tuple[Tensor, ...]:
        return head_problem(draw, tokens, 32, 64, ignored)

    both = (LOGPROBS, ENTROPY)
    yield edge("softcap alone", problem(), softcap=2.0, outputs=both)
    yield edge("scale alone", problem(ignored=7), scale=0.25, outputs=both)
    yield edge("entropy first", problem(), outputs=(ENTROPY, LOGPROBS))
    yield edge("no output", problem(), outputs=())
    yield edge("one token", problem(tokens=1, ignored=0), outputs=both)
    yield edge("no tokens", problem(tokens=0, ignored=0), outputs=both)
    hidden, weight, labels = problem(ignored=0)
    labels[::3], labels[1], labels[-1] = 0, 63, 63
    # Each option beside each other one, without the rest.
    yield edge(
        "the first word is ignored, and softcap", (hidden, weight, labels), ignore_index=0, softcap=3.0, outputs=both
    )
    some: dict[str, Any] = {"ignore_index": 63, "temperature": 0.7, "outputs": both}
    yield edge(
        "the last word is ignored, bias and temperature", (hidden, weight, labels, leaf(draw.normal(64))), **some
    )
    labels = labels.clone().int()
    yield edge(
        "labels of int32, bias and scale", (hidden, weight, labels, leaf(draw.normal(64))), scale=0.5, outputs=both
    )
    labels[::4] = 7
    every: dict[str, Any] = {"outputs": both, "ignore_index": 7}
    every |= {"temperature": draw.normal(16).float().exp(), "softcap": 3.0, "scale": 0.5}
    yield edge("every option at once, labels of int32", (hidden, weight, labels, leaf(draw.normal(64))), **every)
    yield edge("a vocabulary of one", head_problem(draw, 9, 32, 1, ignored=2), outputs=both)
    yield edge("a width of one", head_problem(draw, 13, 1, 64, ignored=2), outputs=both)
    yield edge("top1", _decided(draw), (TOP1,), outputs=(TOP1, LOGPROBS))
    yield edge("mean logit", problem(), (MEAN_LOGIT,), outputs=(LOGPROBS, MEAN_LOGIT), softcap=3.0, temperature=0.5)
    yield edge("squares", problem(), (LOG_SUM_SQUARES,), outputs=(LOG_SUM_SQUARES, ENTROPY), temperature=0.5)
    yield edge("all outputs", _decided(draw), (TOP1, MEAN_LOGIT, LOG_SUM_SQUARES), outputs=OUTPUTS, scale=0.5)
    hidden, weight, labels = problem(ignored=0)
    sure = hidden.detach().clone()
    sure[::2] = 300 * weight.detach()[labels[::2]]  # the probabilities of all other words underflow
    yield edge("every other token is sure", (leaf(sure), weight, labels), outputs=both)
    hidden, weight, labels = _decided(draw)
    labels[5::3] += 64  # the word whose logit is equal to an earlier one's
    tied = leaf(weight.detach().repeat(2, 1))
    yield edge("top1 of words that are equal", (hidden, tied, labels), (TOP1,), outputs=(TOP1, LOGPROBS))
    yield edge("a temperature without a fraction", problem(), temperature=2, outputs=both)


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    both = {"outputs": (LOGPROBS, ENTROPY)}
    yield Sample("past 4096 words", head_problem(draw, tokens=65, hidden=72, vocabulary=5003, ignored=13), both)
    options = {"softcap": 5.0, "scale": 0.5, "temperature": 1.7, **both}
    yield Sample("8192 words, softcap", head_problem(draw, tokens=19, hidden=40, vocabulary=8192), options)
    yield Sample("one word past 4096", head_problem(draw, tokens=9, hidden=16, vocabulary=4097), both)
    yield Sample("a long prompt", head_problem(draw, tokens=1217, hidden=16, vocabulary=40, ignored=1100), both)
    yield Sample("4096 tokens, all learned", head_problem(draw, tokens=4096, hidden=8, vocabulary=33), both)
    yield Sample("one token past 2048", head_problem(draw, tokens=2049, hidden=8, vocabulary=33, ignored=2040), both)
    yield Sample("5120 words", head_problem(draw, tokens=9, hidden=136, vocabulary=5120))

    def make(
        tokens: int,
        hidden: int,
        words: int,
        learned: str,
        bias: bool,
        temperature: str,
        softcap: float | None,
        ignored: int,
        scale: float | None,
        labels: torch.dtype,
        outputs: tuple[str, ...],
        layout: str,
    ) -> Sample:
        states, weight, own = _decided(draw, tokens, words, hidden)
        each = draw.normal(tokens).float().abs() + 0.5 if temperature == "per token" else float(temperature)
        own = own.clamp_min(0).masked_fill(~learned_tokens(learned, tokens, device), ignored).to(labels)
        first = 3.0 * (torch.arange(words, device=device) == 0).to(dtype)  # a bias decides which word is the likeliest
        biases = [leaf(draw.normal(words, scale=0.1) + first)] if bias else []
        options = {"temperature": each, "softcap": softcap, "scale": scale, "ignore_index": ignored, "outputs": outputs}
        needs = tuple(name for name in outputs if name not in DIFFERENTIABLE)
        return Sample("", (laid_out(states.detach(), layout), weight, own, *biases), options, needs)

    shapes = {"tokens": (7, 65, 193), "hidden": (32, 80, 192), "words": (50, 192, 320), "learned": LEARNED}
    numbers = {"softcap": (None, 2.0), "ignored": (IGNORED, 7), "scale": (None, 0.5)}
    kinds = {
        "temperature": ("1", "0.7", "per token"),
        "labels": (torch.int64, torch.int32),
        "layout": (CONTIGUOUS, EVERY_OTHER),
    }
    for outputs in ((OUTPUTS[:1], OUTPUTS[:2], OUTPUTS[1:2]), (OUTPUTS, (TOP1, LOGPROBS))):
        yield from together(make, **shapes, bias=(False, True), **numbers, **kinds, outputs=outputs)
    yield Sample("9001 words", head_problem(draw, tokens=5, hidden=8, vocabulary=9001), both)
    each = {"temperature": draw.normal(4200).float().abs() + 0.5}
    yield Sample("4200 temperatures", head_problem(draw, tokens=4200, hidden=8, vocabulary=17), both | each)
    hidden, weight, at = head_problem(draw, tokens=4, hidden=8, vocabulary=262_208)
    at[-1] = 262_207
    yield Sample("past 262144 words", (hidden, weight, at), both)
    yield from combinations.head_samples(draw, **both)
    shared = both | {"temperature": torch.tensor(0.7, device=device).expand(23)}
    yield Sample("a temperature that tokens share", head_problem(draw, tokens=23, hidden=8, vocabulary=50), shared)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    both = {"outputs": (LOGPROBS, ENTROPY)}
    yield Sample("a model's head", head_problem(draw, tokens=2051, hidden=1024, vocabulary=50_257, ignored=100), both)
    yield Sample("past 131072 words", head_problem(draw, tokens=515, hidden=512, vocabulary=151_936), both)
    yield Sample("past 65535 tokens", head_problem(draw, tokens=65_539, hidden=64, vocabulary=1009, ignored=9), both)


def _decided(draw: Draw, tokens: int = 16, words: int = 64, hidden: int = 32) -> tuple[Tensor, ...]:
    """Tokens whose first word is clear in any dtype: each hidden state points along its label's row, or against it."""
    labels, weight = draw.integers(words, tokens), draw.normal(words, hidden, scale=hidden**-0.5)
    towards = 2.0 - 4.0 * (torch.arange(tokens, device=draw.device) % 2).unsqueeze(1).to(draw.dtype)
    states = weight[labels] * towards
    labels = labels.clone()
    labels[:3] = IGNORED
    return leaf(states), leaf(weight), labels


# In low precision every logit is rounded first. In bf16 the rounding error of a logit of 60 is up to an eighth, which
# changes probabilities, and so entropies and gradients, by about as much.
VALUES = tolerances(float32=(4e-6, 4e-6), bfloat16=(2e-2, 1e-2), float16=(4e-3, 2e-3))
GRADIENTS = tolerances(float32=(4e-5, 1e-5), bfloat16=(1.6e-1, 4e-2), float16=(2e-2, 5e-3))

CONTRACTS = {
    "causal": Contract(
        op_name="token_logprobs",
        variant="causal",
        reference=causal,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        rows=("hidden", "labels", "temperature"),
    ),
}
