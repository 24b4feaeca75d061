"""Calls in which each two choices meet: a kernel has a path per shape, layout and option, and forgets some.

Samples that somebody wrote down have each choice once, mostly beside the usual ones. Of all combinations a few dozen
suffice for every pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import Any

import torch
from torch import Tensor

from veomni_core.kernels import IGNORED
from veomni_ops.contract import Draw, Sample, leaf

_CANDIDATES = 24
LAYOUTS = CONTIGUOUS, EVERY_OTHER, TRANSPOSED = "contiguous", "every other", "transposed"
LEARNED = ("all", "the last", "the first", "one")
ROWS = ((95,), (3, 33), (3, 2, 5), (4, 64))  # of ops by row: counts around tiles, in several dimensions


def every_pair(**choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Combinations of one value of each argument, so that any two values of any two arguments are in one of them.

    Args:
        choices: each argument's values. It draws no random number of the process, and gives the same ones every time.

    Example:
        >>> for call in every_pair(rows=(1, 3), width=(80, 96), scaled=(False, True)):
        ...     print(call)
        {'rows': 1, 'width': 80, 'scaled': False}
        {'rows': 1, 'width': 96, 'scaled': True}
        {'rows': 3, 'width': 80, 'scaled': True}
        {'rows': 3, 'width': 96, 'scaled': False}
    """
    for row in _rows(tuple(map(len, choices.values()))):
        yield {name: values[at] for (name, values), at in zip(choices.items(), row, strict=True)}


@functools.cache
def _rows(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    random = Random(0)
    two = [*combinations(range(len(counts)), 2)]
    left: dict[tuple[int, ...], None] = {
        (a, b, *at): None for a, b in two for at in product(range(counts[a]), range(counts[b]))
    }
    rows = []

    def met(row: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [pair for a, b in two if (pair := (a, b, row[a], row[b])) in left]

    while left:
        a, b, at, bt = next(iter(left))
        fixed = {a: at, b: bt}
        drawn = (tuple(fixed.get(i, random.randrange(n)) for i, n in enumerate(counts)) for _ in range(_CANDIDATES))
        best = max(drawn, key=lambda row: len(met(row)))
        for pair in met(best):
            del left[pair]
        rows.append(best)
    return tuple(rows)


def together(make: Callable[..., Sample], **choices: Sequence[Any]) -> Iterator[Sample]:
    """The samples that ``make`` gives of :func:`every_pair`, named by their choices, for values and gradients alone.

    Args:
        make: takes one value of each argument, by name.
        choices: each argument's values.

    Example:
        >>> def make(rows, width):
        ...     return Sample("", (torch.ones(rows, width),))
        >>> [sample.name for sample in together(make, rows=(3,), width=(80, 96))]
        ['rows 3, width 80', 'rows 3, width 96']
    """
    for call in every_pair(**choices):
        name = ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in call.items())
        yield replace(make(**call), name=name, values_only=True)


def learned_tokens(which: str, count: int, device: torch.device) -> Tensor:
    """Which of ``count`` tokens have a label, as booleans: all, or one of :data:`LEARNED`.

    Example:
        >>> [learned_tokens(which, 6, torch.device("cpu")).int().tolist() for which in LEARNED[1:3]]
        [[0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]
    """
    at, few = torch.arange(count, device=device), count // 3
    if which == "the last":
        return at >= count - few
    if which == "the first":
        return at < few
    return at == count // 2 if which == "one" else at >= 0


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """``tensor`` as a leaf whose first dimensions lie in memory as ``layout`` says.

    Args:
        tensor: of at least two dimensions, contiguous.
        layout: :data:`CONTIGUOUS`, :data:`EVERY_OTHER` (of its second to last dimension), or :data:`TRANSPOSED` (its
            first dimension is the second to last in memory).

    Example:
        >>> [laid_out(torch.ones(5, 3, 2), layout).stride() for layout in (CONTIGUOUS, EVERY_OTHER, TRANSPOSED)]
        [(6, 2, 1), (12, 4, 1), (2, 10, 1)]
    """
    if layout == EVERY_OTHER:
        tensor = tensor.repeat_interleave(2, dim=-2)[..., ::2, :]
    if layout == TRANSPOSED:
        tensor = tensor.transpose(0, -2).contiguous().transpose(0, -2)
    return leaf(tensor)


def head_problem(
    draw: Draw, tokens: int, hidden: int, vocabulary: int, ignored: int = 0, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """Hidden states, an output projection's weight, and labels, of which the first ``ignored`` count in no loss.

    Example:
        >>> hidden, weight, labels = head_problem(Draw(torch.device("cpu"), torch.float32), 5, 8, 17, ignored=2)
        >>> tuple(hidden.shape), tuple(weight.shape), (labels == IGNORED).tolist()
        ((5, 8), (17, 8), [True, True, False, False, False])
    """
    labels = draw.integers(vocabulary, tokens)
    labels[:ignored] = IGNORED
    weight = draw.normal(vocabulary, hidden, scale=scale * hidden**-0.5)
    return leaf(draw.normal(tokens, hidden)), leaf(weight), labels


def head_samples(draw: Draw, **common: Any) -> Iterator[Sample]:
    """Calls of a language model's head in which an option meets many words, or many tokens.

    Example:
        >>> next(head_samples(Draw(torch.device("cpu"), torch.float32))).name
        '5003 words, bias'
    """
    for name, tokens, words, ignored, options in (
        ("5003 words, bias", 9, 5003, 2, {}),
        ("1100 tokens, bias", 1100, 17, 2, {}),
        ("1100 tokens, softcap", 1100, 17, 2, {"softcap": 2.0}),
        ("9001 words, softcap", 9, 9001, 2, {"softcap": 2.0}),
        ("5003 words, a prompt of 300 tokens", 400, 5003, 300, {}),
        ("5003 words, the last one is ignored", 9, 5003, 0, {"ignore_index": 5002}),
        ("5003 words, a frozen head", 9, 5003, 2, {}),
        ("5003 words, every other token", 9, 5003, 2, {}),
    ):
        hidden, weight, labels = head_problem(draw, tokens, 8, words, ignored)
        labels[::3] = options.get("ignore_index", IGNORED)
        states = laid_out(hidden.detach(), EVERY_OTHER if "every other" in name else CONTIGUOUS)
        bias = [leaf(draw.normal(words))] if "bias" in name else []
        call = (states, weight.detach() if "frozen" in name else weight, labels, *bias)
        yield Sample(name, call, {**common, **options})
