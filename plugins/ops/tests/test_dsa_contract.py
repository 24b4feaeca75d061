"""Faults that kernels of sparse attention may have, each caught by the contracts."""

from __future__ import annotations

import pytest
import torch
from planted_faults import assert_caught

from veomni_ops import dsa_attention, dsa_indexer


def a_key_twice(query, key, weights, visible, top_k):
    chosen = dsa_indexer.standard(query, key, weights, visible, top_k)
    return torch.where(chosen < 0, chosen[..., :1], chosen)


def later_keys_win_ties(query, key, weights, visible, top_k):
    scores = dsa_indexer.index_scores(query, key, weights).nan_to_num(nan=torch.inf)
    scores = scores.masked_fill(~dsa_indexer.as_mask(visible, key.shape[1]), -torch.inf).flip(-1)
    order = key.shape[1] - 1 - scores.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    seen = dsa_indexer.as_mask(visible, key.shape[1]).gather(-1, order)
    rising = torch.where(seen, order, key.shape[1]).sort(-1)[0]
    return torch.where(rising == key.shape[1], -1, rising).int()


def highest_first(query, key, weights, visible, top_k):
    scores = dsa_indexer.index_scores(query, key, weights).nan_to_num(nan=torch.inf)
    seen = dsa_indexer.as_mask(visible, key.shape[1])
    order = scores.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    return torch.where(seen.gather(-1, order), order, -1).int()


def without_relu(query, key, weights, visible, top_k):
    wide = torch.float32 if query.dtype != torch.float64 else torch.float64
    merged = torch.einsum("bthd,bth->btd", query.to(wide), weights.to(wide)).unsqueeze(2)
    positive = torch.cat([merged, -merged], dim=2)  # x is relu(x) - relu(-x)
    signs = torch.tensor([1.0, -1.0]).expand(*query.shape[:2], 2)
    return dsa_indexer.standard(positive, key.to(wide), signs, visible, top_k)


def across_packed_sequences(query, key, weights, visible, top_k):
    if visible.dtype == torch.int32:
        visible = visible.clone()
        visible[..., 0] = 0
    return dsa_indexer.standard(query, key, weights, visible, top_k)


def sums_in_float16(query, key, weights, visible, top_k):
    products = torch.einsum("bthd,bsd->bths", query.half(), key.half()).relu()
    scores = torch.einsum("bths,bth->bts", products, weights.half()).float().unsqueeze(2)
    ones = torch.ones_like(scores[..., :1, 0])
    eye = torch.eye(key.shape[1]).expand(len(key), -1, -1)
    shifted = scores.nan_to_num() - scores.nan_to_num().amin() + 1 if scores.numel() else scores  # past the relu
    return dsa_indexer.standard(shifted, eye, ones, visible, top_k)


@pytest.mark.parametrize(
    "kernel",
    [a_key_twice, later_keys_win_ties, highest_first, without_relu, across_packed_sequences, sums_in_float16],
)
def test_another_choice_is_caught(kernel):
    assert_caught(kernel, "is another integer in", op="dsa_indexer")


class _Spoiled(torch.autograd.Function):
    """``keys``, whose gradient is ``spoil`` of what it is."""

    @staticmethod
    def forward(ctx, keys, spoil):
        ctx.spoil = spoil
        return keys.clone()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.spoil(upstream), None


def _with(spoil):
    def kernel(query, keys, *call, **options):
        return dsa_attention.standard(query, _Spoiled.apply(keys, spoil), *call, **options)

    return kernel


def _unselected(gradient):
    """Whatever was in memory where no query has chosen a key."""
    return torch.where((gradient == 0).all(-1, keepdim=True), 1.0, gradient)


def _once(gradient):
    """The first of two batch rows alone."""
    return torch.cat([gradient[:1], torch.zeros_like(gradient[1:])])


unselected_keys_get_what_was_in_memory, one_batch_row_alone = _with(_unselected), _with(_once)
unselected_keys_get_what_was_in_memory.__name__ = "unselected_keys_get_what_was_in_memory"
one_batch_row_alone.__name__ = "one_batch_row_alone"


def values_without_gradient(query, keys, indices, scaling, value_width, **options):
    """Keys learn from logits alone: a value counts as given."""
    result = dsa_attention.standard(query, keys, indices, scaling, value_width, **options)
    output, *loss = result if isinstance(result, tuple) else (result,)
    wide = dsa_attention.compute_dtype(query)
    chosen = dsa_attention.gathered(keys.to(wide), indices)
    logits = torch.einsum("bthd,btkd->bthk", query.to(wide), chosen) * scaling
    weights = dsa_attention.softmax_of_some(logits, (indices >= 0).unsqueeze(2))
    output = torch.einsum("bthk,btkv->bthv", weights, chosen[..., :value_width].detach()).to(output.dtype)
    return (output, *loss) if loss else output


def the_first_key_in_place_of_none(query, keys, indices, *call, **options):
    return dsa_attention.standard(query, keys, indices.clamp_min(0), *call, **options)


def a_loss_that_attention_learns_from(query, keys, *call, index_query=None, **options):
    if index_query is None:
        return dsa_attention.standard(query, keys, *call)
    output, loss = dsa_attention.standard(query, keys, *call, index_query=index_query, **options)
    return output, loss + 0 * loss.detach() + (output.float().mean((2, 3)) - output.float().mean((2, 3)).detach())


def the_divergence_turned_round(query, keys, indices, scaling, value_width, index_query=None, **index):
    if index_query is None:
        return dsa_attention.standard(query, keys, indices, scaling, value_width)
    output, loss = dsa_attention.standard(query, keys, indices, scaling, value_width, index_query=index_query, **index)
    return output, -loss


FAULTS = {
    unselected_keys_get_what_was_in_memory: "the gradient of keys",
    one_batch_row_alone: "the gradient of keys",
    values_without_gradient: "the gradient of keys",
    the_first_key_in_place_of_none: "result",
    a_loss_that_attention_learns_from: "the gradient of",
    the_divergence_turned_round: "result",
}


@pytest.mark.parametrize("kernel", FAULTS, ids=lambda kernel: kernel.__name__)
def test_another_attention_is_caught(kernel):
    assert_caught(kernel, FAULTS[kernel], op="dsa_attention", features=(dsa_attention.INDEXER_LOSS,))


def every_key_is_seen(*call, visible=None, **options):
    visible = torch.ones_like(visible) if visible is not None and visible.dtype == torch.bool else visible
    return dsa_attention.standard(*call, visible=visible, **options)


def sequences_are_not_kept_apart(*call, visible=None, **options):
    if visible is not None and visible.dtype == torch.int32:
        visible = torch.stack([torch.zeros_like(visible[..., 0]), visible[..., 1]], dim=-1)
    return dsa_attention.standard(*call, visible=visible, **options)


DENSE_FAULTS = {every_key_is_seen: "all keys but holes", sequences_are_not_kept_apart: "all keys of packed"}


@pytest.mark.parametrize("kernel", DENSE_FAULTS, ids=lambda kernel: kernel.__name__)
def test_another_dense_stage_is_caught(kernel):
    features = dsa_attention.INDEXER_LOSS, dsa_attention.DENSE_STAGE
    assert_caught(kernel, DENSE_FAULTS[kernel], op="dsa_attention", features=features)
