"""dsa_attention: attention of each query to its own choice of keys, which all heads share, as latents of MLA.

A key of multi-head latent attention is its latent and its rotated part, one for all heads, and the latent is the value
too. The matrices that would expand it for each head are multiplied to queries and outputs instead. A site's ``sizes``
are ``heads``, ``width`` (of queries and keys), ``value_width`` and ``top_k``.

Shape suffixes: ``B`` batch, ``T`` queries, ``S`` keys, ``H`` heads, ``D`` width of keys, ``V`` width of values, ``K``
chosen keys, ``I`` heads of the indexer, ``E`` their width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from veomni_core.kernels import cast_as_autocast
from veomni_ops.combinations import LAYOUTS, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, compute_dtype, leaf, tolerances
from veomni_ops.visible_keys import as_mask, causal_ranges, check_visible

INDEXER_LOSS = "indexer_loss"  # the feature of kernels that also compute the indexer's loss
DENSE_STAGE = "dense_stage"  # the feature of kernels that take ``visible`` in the place of ``indices``


def standard(
    query: Tensor,
    keys: Tensor,
    indices: Tensor | None,
    scaling: float,
    value_width: int,
    index_query: Tensor | None = None,
    index_key: Tensor | None = None,
    index_weights: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of ``query[t]`` over the keys ``indices[t]``, whose first ``value_width`` columns are values.

    The logits of head ``h`` are ``scaling * query[t, h] @ keys[indices[t]]``. A query without a key gets zeros, and
    gives and gets no gradient. Gradients of ``query`` and ``keys``.

    With the inputs of the indexer it also computes the loss that DeepSeek-V3.2's indexer learns from in its sparse
    stage: ``KL(p || softmax(scores))`` over a query's chosen keys, where ``p`` is the mean of all heads' attention, and
    the scores are those of :func:`veomni_ops.dsa_indexer.standard`. It has gradients of the indexer's inputs alone:
    ``p`` counts as given. ``visible`` is of the dense stage, in which the indexer warms up: attention and loss are over
    all keys that a query sees.

    Args:
        query: ``[B, T, H, D]``.
        keys: ``[B, S, D]``, in the dtype of ``query``.
        indices: int32 ``[B, T, K]``, in each row distinct keys in any order, and -1 for no key; ``None`` with
            ``visible``.
        scaling: multiplies the logits.
        value_width: at most ``D``.
        index_query: the indexer's queries ``[B, T, I, E]``; with it come the next two.
        index_key: the indexer's keys ``[B, S, E]``.
        index_weights: the weights of the indexer's heads ``[B, T, I]``.
        visible: the keys that each query sees, as in :func:`veomni_ops.dsa_indexer.standard`.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``query``; with the indexer's inputs also the loss of each query ``[B, T]`` in
        float32 (float64 for float64 ``query``), 0 for one without keys.

    Raises:
        ValueError: shapes or dtypes don't fit together (:func:`check_call`).

    Example:
        >>> query, keys = torch.zeros(1, 2, 1, 3), torch.tensor([[[1.0, 0.0, 9.0], [3.0, 2.0, 9.0]]])
        >>> indices = torch.tensor([[[0, -1], [0, 1]]], dtype=torch.int32)
        >>> standard(query, keys, indices, scaling=1.0, value_width=2).tolist()
        [[[[1.0, 0.0]], [[2.0, 1.0]]]]
    """
    check_call(query, keys, indices, value_width, index_query, index_key, index_weights, visible)
    indices = every_key(visible, keys.shape[1]) if indices is None else indices
    query, keys = cast_as_autocast(query), cast_as_autocast(keys)
    wide = compute_dtype(query)
    is_key = indices >= 0
    chosen = gathered(keys.to(wide), indices)
    logits = torch.einsum("bthd,btkd->bthk", query.to(wide), chosen) * scaling
    probabilities = softmax_of_some(logits, is_key.unsqueeze(2))
    output = torch.einsum("bthk,btkv->bthv", probabilities, chosen[..., :value_width]).to(query.dtype)
    if index_query is None or index_key is None or index_weights is None:
        return output
    return output, divergence(index_query, index_key, index_weights, indices, probabilities.detach().mean(2))


def divergence(
    index_query: Tensor, index_key: Tensor, index_weights: Tensor, indices: Tensor, target: Tensor
) -> Tensor:
    """The indexer's loss of each query ``[B, T]``: from ``target[B, T, K]``, 0 where no key is, to its own softmax.

    Example:
        >>> ones, indices = torch.ones(1, 1, 1, 2), torch.tensor([[[0, 1]]])  # two keys with the same score
        >>> same = divergence(ones, torch.ones(1, 2, 2), torch.ones(1, 1, 1), indices, torch.tensor([[[0.5, 0.5]]]))
        >>> one = divergence(ones, torch.ones(1, 2, 2), torch.ones(1, 1, 1), indices, torch.tensor([[[1.0, 0.0]]]))
        >>> abs(round(same.item(), 4)), round(one.item(), 4)
        (0.0, 0.6931)
    """
    wide = compute_dtype(target)
    is_key = indices >= 0
    products = torch.einsum("btie,btke->btik", index_query.to(wide), gathered(index_key.to(wide), indices)).relu()
    scores = torch.einsum("btik,bti->btk", products, index_weights.to(wide))
    hidden = ~is_key & is_key.any(-1, keepdim=True)  # of a query without any key nothing, since that gave NaN
    log_found = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(~is_key, 0.0)
    return (torch.xlogy(target, target) - target * log_found).sum(-1)


def every_key(visible: Tensor | None, keys: int) -> Tensor:
    """The ``indices`` that choose all of ``keys`` keys that are ``visible``.

    Example:
        >>> every_key(torch.tensor([[[0, 1], [1, 3]]], dtype=torch.int32), 3).tolist()
        [[[0, -1, -1], [-1, 1, 2]]]
    """
    assert visible is not None
    places = torch.arange(keys, dtype=torch.int32, device=visible.device)
    return torch.where(as_mask(visible, keys), places, -1)


def gathered(keys: Tensor, indices: Tensor) -> Tensor:
    """The rows of ``keys[B, S, D]`` at ``indices[B, T, K]``, as ``[B, T, K, D]``; zeros where an index is -1.

    Example:
        >>> gathered(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[[2, 0], [1, -1]]])).squeeze(-1)
        tensor([[[3., 1.],
                 [2., 0.]]])
    """
    flat = indices.clamp_min(0).long().flatten(1).unsqueeze(-1).expand(-1, -1, keys.shape[-1])
    rows = keys.gather(1, flat).view(*indices.shape, keys.shape[-1])
    return rows.masked_fill((indices < 0).unsqueeze(-1), 0.0)


def softmax_of_some(logits: Tensor, counts: Tensor) -> Tensor:
    """The softmax over the last dimension of those that ``counts``, and zeros elsewhere, also where none does.

    Example:
        >>> softmax_of_some(torch.zeros(2, 3), torch.tensor([[True, True, False], [False, False, False]]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    some = counts.any(-1, keepdim=True)
    return logits.masked_fill(~counts & some, -torch.inf).softmax(-1).masked_fill(~counts, 0.0)


def check_call(
    query: Tensor,
    keys: Tensor,
    indices: Tensor | None,
    value_width: int,
    index_query: Tensor | None = None,
    index_key: Tensor | None = None,
    index_weights: Tensor | None = None,
    visible: Tensor | None = None,
) -> None:
    """Check that the inputs of a call fit together. A kernel calls it first. It reads shapes and dtypes, and no values.

    Raises:
        ValueError: a shape or dtype doesn't fit to the others, or some of the indexer's inputs are missing.

    Example:
        >>> query, keys, indices = torch.zeros(1, 4, 2, 8), torch.zeros(1, 9, 8), torch.zeros(1, 4, 3).int()
        >>> check_call(query, keys, indices, 6)
        >>> check_call(query, keys, indices, 16)
        Traceback (most recent call last):
            ...
        ValueError: dsa_attention: value_width is 16; give how many of the 8 columns of keys are values
    """
    if query.dim() != 4 or keys.dim() != 3 or (keys.shape[0], keys.shape[2]) != (query.shape[0], query.shape[3]):
        shapes = f"query is {list(query.shape)} and keys {list(keys.shape)}"
        raise ValueError(f"dsa_attention: {shapes}; give [B, T, H, D] and [B, S, D]")
    if query.dtype != keys.dtype:
        raise ValueError(f"dsa_attention: query is {query.dtype} and keys {keys.dtype}; give both in one dtype")
    if (indices is None) is (visible is None):
        raise ValueError("dsa_attention: give indices, or for attention to all keys visible, and not both")
    if visible is not None:
        check_visible("dsa_attention", visible, query.shape[:2], keys.shape[1])
    if indices is not None and (
        indices.dim() != 3 or indices.shape[:2] != query.shape[:2] or indices.dtype != torch.int32
    ):
        rows = f"[{query.shape[0]}, {query.shape[1]}, K]"
        raise ValueError(f"dsa_attention: indices is {indices.dtype} {list(indices.shape)}; give int32 {rows}")
    if not 0 < value_width <= keys.shape[2]:
        columns = f"how many of the {keys.shape[2]} columns of keys are values"
        raise ValueError(f"dsa_attention: value_width is {value_width}; give {columns}")
    given = [each for each in (index_query, index_key, index_weights) if each is not None]
    if not given:
        return
    if index_query is None or index_key is None or index_weights is None:
        raise ValueError("dsa_attention: give index_query, index_key and index_weights together, or none of them")
    heads, width = index_query.shape[2:]
    wanted = (*query.shape[:2], heads, width), (*keys.shape[:2], width), (*query.shape[:2], heads)
    if tuple(tuple(each.shape) for each in given) != wanted:
        shapes = " and ".join(str(list(each.shape)) for each in given)
        wish = " and ".join(str(list(each)) for each in wanted)
        raise ValueError(f"dsa_attention: the indexer's inputs are {shapes}; give {wish}")


class _Problems:
    """Draws the arguments of calls."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self._draw = device, Draw(device, dtype, seed)

    def call(
        self,
        batch: int,
        queries: int,
        top_k: int,
        heads: int = 4,
        widths: tuple[int, int] = (24, 16),
        keys: int = 0,
        scale: float = 1.0,
    ) -> tuple[Any, ...]:
        """Query, keys, indices, scaling, value width; causal, so that early queries have fewer keys than ``top_k``."""
        keys, (width, values) = keys or queries, widths
        query = self._draw.normal(batch, queries, heads, width, scale=scale)
        latents = self._draw.normal(batch, keys, width)
        # A random order of all keys, of which those that come later than the query, and too many, are none.
        order = self._draw.normal(batch, queries, keys).float().argsort(-1)[..., :top_k]
        last = torch.arange(queries, device=self.device).view(-1, 1) + keys - queries
        indices = torch.where(order <= last, order, -1).to(torch.int32)
        return leaf(query), leaf(latents), indices, width**-0.5, values

    def indexer(self, call: tuple[Any, ...], heads: int = 3, width: int = 8) -> dict[str, Tensor]:
        """The inputs of an indexer for ``call``."""
        (batch, queries), keys = call[0].shape[:2], call[1].shape[1]
        inputs = {
            "index_query": self._draw.normal(batch, queries, heads, width),
            "index_key": self._draw.normal(batch, keys, width),
            "index_weights": self._draw.normal(batch, queries, heads, scale=(heads * width) ** -0.5).float(),
        }
        return {name: leaf(each) for name, each in inputs.items()}


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    needs = (INDEXER_LOSS,)
    yield Sample("odd sizes", problems.call(3, 19, 5, heads=3, widths=(13, 7)))
    yield Sample("as many keys as there are", problems.call(1, 12, 12))
    yield Sample("more keys than a tile", problems.call(2, 40, 33))
    call = problems.call(2, 17, 6)
    yield Sample("the indexer's loss", call, problems.indexer(call), needs)
    query, keys, indices, *rest = problems.call(2, 18, 6)
    yield Sample("every other query", (leaf(query.detach()[:, ::2]), keys, indices[:, ::2], *rest))
    wide = leaf(keys.detach().repeat_interleave(2, dim=-1)[..., ::2])
    yield Sample("every other column of a key", (query, wide, indices, *rest))
    heads_first = leaf(query.detach().transpose(1, 2).contiguous().transpose(1, 2))
    yield Sample("heads before queries in memory", (heads_first, keys, indices, *rest))
    yield from _edges(_Problems(device, dtype, seed=3))
    yield from _dense(_Problems(device, dtype, seed=4))


def _dense(problems: _Problems) -> Iterator[Sample]:
    """The dense stage: ranges and masks of bools, packed, with more keys than queries, and queries that see none."""
    both = (DENSE_STAGE, INDEXER_LOSS)
    for name, queries, keys, lengths in (("all keys", 19, 19, ()), ("all keys of packed", 21, 21, (3, 1, 17))):
        query, latents, _, *rest = call = problems.call(2, queries, 1, keys=keys)
        ranges = causal_ranges(2, queries, keys, lengths).to(problems.device)
        given = {"visible": ranges, **problems.indexer(call)}
        yield Sample(f"{name}, the indexer's loss", (query, latents, None, *rest), given, both)
    query, latents, _, *rest = problems.call(2, 9, 1, keys=30)
    seen = as_mask(causal_ranges(2, 9, 30).to(problems.device), 30).clone()
    seen[0, :, 4:9] = False
    yield Sample("all keys but holes", (query, latents, None, *rest), {"visible": seen}, (DENSE_STAGE,))
    seen = seen.clone()
    seen[1, 2:4] = False
    call = query, latents, None, *rest
    yield Sample("all keys, of which a query sees none", call, {"visible": seen}, (DENSE_STAGE,), values_only=True)
    query, latents, _, *rest = call = problems.call(2, 21, 1)
    ranges = causal_ranges(2, 21, 21, (3, 1, 17)).to(problems.device)
    for name, visible, given, needs in (
        ("all keys of packed", ranges, {}, both[:1]),
        ("all keys but holes, the indexer's loss", as_mask(ranges, 21), problems.indexer(call), both),
    ):
        yield Sample(name, (query, latents, None, *rest), {"visible": visible, **given}, needs, values_only=True)


def _edges(problems: _Problems) -> Iterator[Sample]:
    def edge(name: str, call: tuple[Any, ...], needs: tuple[str, ...] = (), **options: Any) -> Sample:
        return Sample(name, call, options, needs, values_only=True)

    # With one key a query's gradient is 0, which no kernel meets but by chance: it isn't compared.
    frozen, *rest = problems.call(1, 1, 4)
    yield edge("one token", (frozen.detach(), *rest))
    yield edge("no queries", problems.call(1, 0, 3, keys=5))
    yield edge("no batch", problems.call(0, 4, 3))
    frozen, *rest = problems.call(2, 9, 1)
    yield edge("one key each", (frozen.detach(), *rest))
    yield edge("values as wide as keys", problems.call(1, 9, 4, widths=(16, 16)))
    yield edge("one head of one column", problems.call(1, 11, 4, heads=1, widths=(1, 1)))
    yield edge("seventeen heads", problems.call(1, 8, 4, heads=17))
    yield edge("fewer queries than keys", problems.call(2, 3, 5, keys=30))
    query, keys, indices, *rest = problems.call(1, 14, 5)
    yield edge("no query has a key", (query, keys, torch.full_like(indices, -1), *rest))
    indices = indices.clone()
    indices[:, 3:6] = -1
    yield edge("queries without a key", (query, keys, indices, *rest))
    call = (query, keys, indices, *rest)
    yield edge("the loss of queries without a key", call, (INDEXER_LOSS,), **problems.indexer(call))
    holes = problems.call(1, 14, 5)[2].clone()
    holes[:, :, 1] = -1
    yield edge("no key among the others", (query, keys, holes, *rest))
    indices = torch.full_like(holes, -1)
    indices[..., :2] = (torch.arange(14, device=indices.device)[:, None] + torch.tensor([0, 1]).to(indices)) % 4
    yield edge("all queries choose among four keys", (query, keys, indices, *rest))
    yield edge("large logits", problems.call(1, 12, 6, scale=30.0))
    call = problems.call(2, 12, 6)
    yield edge("an indexer of one head", call, (INDEXER_LOSS,), **problems.indexer(call, heads=1, width=3))
    frozen = {name: each.detach() for name, each in problems.indexer(call).items()}
    yield edge("a frozen indexer", call, (INDEXER_LOSS,), **frozen)
    query, keys, *rest = problems.call(2, 12, 6)
    yield edge("int32 indices in steps", (query, keys, rest[0].repeat_interleave(2, -1)[..., ::2], *rest[1:]))


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("several tiles", problems.call(1, 130, 100, heads=65, widths=(96, 64)))
    call = problems.call(1, 70, 67, heads=16, widths=(40, 32))
    yield Sample("several tiles, the indexer's loss", call, problems.indexer(call, heads=17, width=24), (INDEXER_LOSS,))
    yield Sample("latents of 512 and 64 columns", problems.call(1, 33, 40, heads=16, widths=(576, 512)))

    def make(
        batch: int,
        queries: int,
        more_keys: int,
        top_k: int,
        heads: int,
        widths: tuple[int, int],
        holes: bool,
        scaling: float,
        layout: str,
        loss: tuple[int, int] | None,
    ) -> Sample:
        query, keys, indices, _, values = problems.call(batch, queries, top_k, heads, widths, queries + more_keys)
        if holes:
            indices = indices.clone()
            indices[:, ::3, 1] = -1
        call = laid_out(query.detach(), layout), keys, indices, scaling, values
        return Sample("", call, problems.indexer(call, *loss) if loss else {}, (INDEXER_LOSS,) if loss else ())

    shapes = {"batch": (1, 3), "queries": (9, 66), "more_keys": (0, 70), "top_k": (5, 130), "heads": (3, 16, 32)}
    kinds = {"holes": (False, True), "scaling": (0.1, 0.3), "layout": LAYOUTS}
    for losses in ((None,), ((3, 8), (16, 64))):
        yield from together(make, **shapes, widths=((24, 16), (80, 80), (96, 64)), **kinds, loss=losses)
    for name, lengths, widths in (
        ("all keys of packed, in several tiles", (70, 30, 50), (24, 16)),
        ("all keys, latents of 512 and 64 columns", (33,), (576, 512)),
    ):
        query, latents, _, *rest = problems.call(1, sum(lengths), 1, 3, widths)
        visible = causal_ranges(1, sum(lengths), sum(lengths), lengths).to(device)
        call = query, latents, None, *rest
        yield Sample(name, call, {"visible": visible}, (DENSE_STAGE,), values_only=True)
    call = problems.call(1, 9, 5, heads=80)
    yield Sample("80 heads, the indexer's loss", call, problems.indexer(call), (INDEXER_LOSS,), values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("a model's widths", problems.call(1, 700, 512, heads=128, widths=(576, 512)))
    call = problems.call(1, 400, 300, heads=128, widths=(576, 512))
    yield Sample("a model's widths, the loss", call, problems.indexer(call, heads=64, width=128), (INDEXER_LOSS,))


# In low precision kernels round probabilities, and their gradients, before they multiply them.
VALUES = tolerances(float32=(2e-5, 2e-6), bfloat16=(3e-2, 5e-3), float16=(4e-3, 7e-4))
GRADIENTS = tolerances(float32=(6e-5, 6e-6), bfloat16=(8e-2, 1e-2), float16=(1e-2, 1.5e-3))

CONTRACTS = {
    "standard": Contract(
        op_name="dsa_attention",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        # Keys, which a norm gives, are values too: the rounding of their products counts by the factor's cube. By
        # FlashAttention's backward float32 is off by 2e-5 at 10, 2e-3 at 100 and 0.3 at 1000.
        large_factor=1e1,
    ),
}
