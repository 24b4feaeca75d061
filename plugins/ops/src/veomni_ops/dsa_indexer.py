"""dsa_indexer: which keys each query attends to in DeepSeek's sparse attention, by the scores of an indexer's heads.

Models write the scores' factors, ``H ** -0.5`` and ``D ** -0.5``, in several places; here they are part of the weights.
A site's ``sizes`` are ``heads``, ``head_dim`` and ``top_k``.

Shape suffixes: ``B`` batch, ``T`` queries, ``S`` keys, ``H`` heads, ``D`` their width, ``K`` chosen keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veomni_ops.combinations import together
from veomni_ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype
from veomni_ops.visible_keys import as_mask, causal_ranges, check_visible


def standard(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` keys with the highest scores among those that each query may see, in the order of the keys.

    The score of a key ``s`` for a query ``t`` is ``sum over h of weights[t, h] * relu(query[t, h] @ key[s])``, in
    float32. Of equal scores, that of the earlier key counts as higher. A score that is NaN counts as the highest.

    Args:
        query: ``[B, T, H, D]``.
        key: one for all heads ``[B, S, D]``, in the dtype of ``query``.
        weights: ``[B, T, H]``, any floating dtype; mostly float32.
        visible: the keys that each query may see: bool ``[B, T, S]``; or int32 ``[B, T, 2]``, of each query the first
            such key and the one after the last. Both may leave a query none.
        top_k: how many keys are chosen, at least 1.

    Returns:
        int32 ``[B, T, min(top_k, S)]``: in each row the chosen keys, rising, and then -1 where the query sees fewer. No
        gradient passes.

    Raises:
        ValueError: shapes or dtypes don't fit together (:func:`check_call`).

    Example:
        >>> query, key = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 3.0, 3.0]).view(1, 3, 1)
        >>> causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
        >>> standard(query, key, torch.ones(1, 3, 1), causal, top_k=1).flatten()  # the second 3 is as high, and later
        tensor([0, 1, 1], dtype=torch.int32)
        >>> ranges = torch.tensor([[[0, 1], [1, 2], [1, 3]]], dtype=torch.int32)  # two packed sequences, of 1 and 2
        >>> standard(query, key, torch.ones(1, 3, 1), ranges, top_k=2)
        tensor([[[ 0, -1],
                 [ 1, -1],
                 [ 1,  2]]], dtype=torch.int32)
    """
    check_call(query, key, weights, visible, top_k)
    scores = index_scores(query, key, weights)
    seen = as_mask(visible, key.shape[1])
    # Stable, so that of equal scores the earlier key comes first.
    scores = scores.nan_to_num(nan=torch.inf).masked_fill(~seen, -torch.inf)
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    none = key.shape[1]
    rising = torch.where(seen.gather(-1, chosen), chosen, none).sort(-1)[0]
    return torch.where(rising == none, -1, rising).to(torch.int32)


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Every query's score of every key ``[B, T, S]``, in float32 (float64 for float64 ``query``).

    Example:
        >>> query, key = torch.tensor([[[[1.0], [-1.0]]]]), torch.tensor([[[2.0], [-3.0]]])  # two heads, two keys
        >>> index_scores(query, key, torch.tensor([[[1.0, 10.0]]]))
        tensor([[[ 2., 30.]]])
    """
    wide = compute_dtype(query)
    products = torch.einsum("bthd,bsd->bths", query.to(wide), key.to(wide)).relu()
    return torch.einsum("bths,bth->bts", products, weights.to(wide))


def check_call(query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> None:
    """Check that the inputs of a call fit together. A kernel calls it first. It reads shapes and dtypes, and no values.

    Raises:
        ValueError: a shape or dtype doesn't fit to the others, or ``top_k`` is below 1.

    Example:
        >>> query, key, weights = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 8), torch.zeros(1, 4, 2)
        >>> check_call(query, key, weights, torch.zeros(1, 4, 2, dtype=torch.int32), 3)
        >>> check_call(query, key, weights, torch.zeros(1, 4, 3, dtype=torch.int32), 3)
        Traceback (most recent call last):
            ...
        ValueError: dsa_indexer: visible is torch.int32 [1, 4, 3]; give bool [1, 4, 4] or int32 [1, 4, 2]
    """
    if query.dim() != 4 or key.dim() != 3 or (key.shape[0], key.shape[2]) != (query.shape[0], query.shape[3]):
        shapes = f"query is {list(query.shape)} and key {list(key.shape)}"
        raise ValueError(f"dsa_indexer: {shapes}; give [B, T, H, D] and [B, S, D]")
    if query.dtype != key.dtype:
        raise ValueError(f"dsa_indexer: query is {query.dtype} and key {key.dtype}; give both in one dtype")
    if weights.shape != query.shape[:3]:
        raise ValueError(f"dsa_indexer: weights is {list(weights.shape)}; give {list(query.shape[:3])}")
    check_visible("dsa_indexer", visible, query.shape[:2], key.shape[1])
    if top_k < 1:
        raise ValueError(f"dsa_indexer: top_k is {top_k}; give how many keys a query attends to, at least 1")


Call = tuple[Tensor, Tensor, Tensor, Tensor, int]


class _Problems:
    """Draws the arguments of calls. No two scores of a query are close, unless ``tied``."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self._draw = device, Draw(device, dtype, seed)

    def call(
        self,
        batch: int,
        queries: int,
        top_k: int,
        heads: int = 4,
        width: int = 16,
        keys: int = 0,
        lengths: tuple[int, ...] = (),
        as_bools: bool = False,
        tied: bool = False,
    ) -> Call:
        """A causal call; ``keys`` is ``queries`` by default, and all are one sequence unless ``lengths`` says more."""
        keys = keys or queries
        shapes = (batch, queries, heads, width), (batch, keys, width), (batch, queries, heads)
        if tied:  # small integers: products and sums are exact in every dtype, and many scores are equal
            query, key, weights = (self._draw.integers(3, *shape, low=-1).to(self._draw.dtype) for shape in shapes)
        else:
            query, key, weights = (self._draw.normal(*shape) for shape in shapes)
        ranges = causal_ranges(batch, queries, keys, lengths).to(self.device)
        return query, key, weights.float(), as_mask(ranges, keys) if as_bools else ranges, top_k


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("odd sizes", problems.call(3, 37, 5, heads=3, width=9))
    yield Sample("a mask of bools", problems.call(2, 29, 7, as_bools=True))
    yield Sample("packed", problems.call(1, 41, 6, lengths=(3, 1, 20, 17)))
    yield Sample("packed in sequences shorter than top_k", problems.call(2, 21, 9, lengths=(2, 5, 8, 6)))
    yield Sample("ties", problems.call(2, 45, 8, tied=True))
    query, key, weights, visible, top_k = problems.call(2, 26, 6)
    yield Sample("every other query", (query[:, ::2], key, weights[:, ::2], visible[:, ::2], top_k))
    wide = key.repeat_interleave(2, dim=-1)[..., ::2]
    yield Sample("every other column of a key", (query, wide, weights, visible, top_k))
    yield from _edges(_Problems(device, dtype, seed=3))


def _edges(problems: _Problems) -> Iterator[Sample]:
    def edge(name: str, call: Call) -> Sample:
        return Sample(name, call, values_only=True)

    yield edge("more keys wanted than there are", problems.call(1, 6, 50))
    yield edge("as many keys wanted as there are", problems.call(2, 9, 9, as_bools=True))
    yield edge("one key wanted", problems.call(2, 33, 1))
    yield edge("one token", problems.call(1, 1, 4))
    yield edge("no queries", problems.call(2, 0, 4, keys=3))
    yield edge("no batch", problems.call(0, 5, 4))
    yield edge("fewer queries than keys", problems.call(2, 3, 5, keys=40))
    yield edge("one query", problems.call(1, 1, 5, keys=70, as_bools=True))
    yield edge("one head of one column", problems.call(1, 19, 4, heads=1, width=1))
    yield edge("many heads", problems.call(1, 20, 4, heads=33, width=8))
    yield edge("packed, of one token each", problems.call(1, 11, 3, lengths=(1,) * 11))
    yield edge("packed, ties", problems.call(1, 70, 9, lengths=(5, 33, 32), tied=True))
    yield edge("ties in bools", problems.call(1, 50, 16, as_bools=True, tied=True))
    query, key, _, visible, top_k = problems.call(1, 24, 5)
    yield edge("every score is zero", (query, key, torch.zeros_like(query[..., 0]).float(), visible, top_k))
    query, key, weights, visible, top_k = problems.call(2, 24, 5)
    yield edge("weights below zero", (query, key, -weights.abs(), visible, top_k))
    seen = as_mask(visible, 24).clone()
    seen[0, :, 4:9] = False  # padding between words, which no range says
    seen[1, 7] = False
    yield edge("holes, and a query that sees nothing", (query, key, weights, seen, top_k))
    ranges = visible.clone()
    ranges[:, :6] = 0  # to the left there is padding
    ranges[:, 6:, 0] = 6
    yield edge("padding to the left", (query, key, weights, ranges, top_k))
    seen = as_mask(visible, 24).clone().fill_(True)
    yield edge("every key is seen", (query, key, weights, seen, top_k))
    seen = seen.clone().tril(-20)
    yield edge("few queries see anything", (query, key, weights, seen, top_k))
    # In float16 a product of these is beyond the largest number; the scores are not, in float32.
    query, key, weights, visible, top_k = problems.call(1, 30, 6)
    yield edge("products beyond float16", (query * 64, key * 64, weights * 1e-3, visible, top_k))
    query = query.clone()
    query[:, 5::20, 0, 0] = torch.nan  # one sees as many keys as are wanted, the other 26
    yield edge("queries that are NaN", (query, key, weights, visible, top_k))


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("several tiles", problems.call(1, 203, 64, heads=17, width=72, lengths=(3, 197, 2, 1)))
    yield Sample("several tiles of ties", problems.call(2, 161, 33, tied=True))
    yield Sample("several tiles in bools", problems.call(1, 131, 100, heads=64, width=128, as_bools=True))
    yield Sample("keys past a block", problems.call(1, 5, 130, keys=4100, tied=True))

    def make(
        batch: int,
        queries: int,
        more_keys: int,
        heads: int,
        width: int,
        top_k: int,
        bools: str,
        ties: bool,
        weights: torch.dtype,
    ) -> Sample:
        keys = queries + more_keys
        query, key, own, visible, _ = problems.call(
            batch, queries, top_k, heads, width, keys, (), bools != "ranges", ties
        )
        if bools == "transposed bools":
            visible = visible.transpose(1, 2).contiguous().transpose(1, 2)
        if bools == "ranges":
            visible[:, :, 0] = visible[:, :, 1] // 2  # a window that moves
        return Sample("", (query, key, own.to(weights), visible, top_k))

    shapes = {"batch": (1, 3), "queries": (5, 70), "more_keys": (20, 100), "heads": (1, 5, 16), "width": (8, 80)}
    kinds = {"bools": ("ranges", "bools", "transposed bools"), "ties": (False, True), "weights": (torch.float32, dtype)}
    yield from together(make, **shapes, top_k=(2, 20, 128), **kinds)
    query, key, weights, visible, top_k = problems.call(1, 5, 512, 1, keys=8200, tied=True)
    query[..., 0] = key[..., 0] = 33.0  # exact still, and all scores are in one bin of a search by the highest bits
    call = query, key, torch.ones_like(weights), visible, top_k
    yield Sample("8200 scores close to each other", call, values_only=True)
    yield Sample("one of 1100 keys wanted", problems.call(1, 7, 1, keys=1100), values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("past 2048 keys, ties", problems.call(1, 3001, 2048, heads=8, width=128, tied=True))
    yield Sample("packed, ties", problems.call(1, 4097, 512, heads=8, width=64, lengths=(700, 3000, 397), tied=True))


EXACT = dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(element=0.0, norm=0.0))  # results are integers

CONTRACTS = {
    "standard": Contract(
        op_name="dsa_indexer",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=EXACT,
        gradients=EXACT,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
    ),
}
