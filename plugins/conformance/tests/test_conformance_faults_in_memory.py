"""Faults that show by where numbers lie, by numbers that are not finite, and beyond one tile."""

from __future__ import annotations

import pytest
import torch
from planted_faults import SwiGLU, assert_caught, failures_of, right
from torch.nn import functional as F

from veomni_ops import (
    attention,
    cross_entropy_loss,
    load_balancing_loss,
    moe_experts,
    rms_norm,
    rotary_pos_emb,
    swiglu_mlp,
)
from veomni_ops.contract import Size


def _as_if_contiguous(tensor):
    """What a kernel reads that ignores strides, from where the tensor starts."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def ignores_strides_of_the_last_dimension(gate, up):
    return right(_as_if_contiguous(gate) if gate.dim() and gate.stride(-1) != 1 else gate, up)


def takes_one_inputs_strides_for_both(gate, up):
    fits = up.untyped_storage().nbytes() // up.element_size() >= gate.untyped_storage().nbytes() // gate.element_size()
    return right(gate, up.as_strided(gate.shape, gate.stride(), up.storage_offset()) if fits else up)


def ignores_the_storage_offset(gate, up):
    return right(gate.as_strided(gate.shape, gate.stride(), 0), up)


def reads_zeros_where_rows_are_repeated(gate, up):
    return right(gate * (gate.stride(0) != 0), up)


class _TrustsUpstream(SwiGLU):
    @staticmethod
    def backward(ctx, upstream):
        count = upstream.untyped_storage().nbytes() // upstream.element_size()
        whole = upstream.as_strided((count,), (1,), 0)
        flat = whole.repeat(-(-upstream.numel() // max(count, 1)))[: upstream.numel()]
        return SwiGLU.backward(ctx, flat.view(upstream.shape))


def takes_the_incoming_gradient_for_contiguous(gate, up):
    return _TrustsUpstream.apply(gate, up)


class _NeedsViews(SwiGLU):
    @staticmethod
    def backward(ctx, upstream):
        return SwiGLU.backward(ctx, upstream.view(-1).view(upstream.shape))


def views_the_incoming_gradient(gate, up):
    return _NeedsViews.apply(gate, up)


_PLANS: dict[torch.Size, tuple[int, ...]] = {}


class _KeepsAPlan(SwiGLU):
    """As torch does for cuDNN's attention: the plan of backward is that of the first gradient of a shape."""

    @staticmethod
    def backward(ctx, upstream):
        last = sum((size - 1) * stride for size, stride in zip(upstream.shape, upstream.stride(), strict=True))
        if upstream.dim() and (upstream.stride(-1) != 1 or last + 1 != upstream.numel()):
            upstream = upstream.contiguous()
        strides = _PLANS.setdefault(upstream.shape, upstream.stride())
        return SwiGLU.backward(ctx, upstream.as_strided(upstream.shape, strides))


def keeps_the_plan_of_the_first_incoming_gradient(gate, up):
    return _KeepsAPlan.apply(gate, up)


def one_buffer_for_both_results(q, k, cos, sin, unsqueeze_dim=1):
    with torch.no_grad():
        buffers = [each.clone() for each in rotary_pos_emb.full(q, k, cos, sin, unsqueeze_dim)]
    return rotary_pos_emb.full(q, k, cos, sin, unsqueeze_dim) if q.shape != k.shape else (buffers[0], buffers[0])


IN_MEMORY = [
    (ignores_strides_of_the_last_dimension, "with its inputs every second element of a larger tensor"),
    (takes_one_inputs_strides_for_both, "each of the others in another way, the result is off"),
    (ignores_the_storage_offset, "the result is"),
    (reads_zeros_where_rows_are_repeated, "with inputs that repeat one row by a stride of zero, the result is off"),
    (takes_the_incoming_gradient_for_contiguous, "with an incoming gradient"),
    (
        views_the_incoming_gradient,
        "with an incoming gradient every second element of a larger tensor, it raises RuntimeError",
    ),
    (
        keeps_the_plan_of_the_first_incoming_gradient,
        "with an incoming gradient with its rows in another order, the gradient of gate is off",
    ),
]


@pytest.mark.parametrize("kernel, words", IN_MEMORY, ids=[fault[0].__name__ for fault in IN_MEMORY])
def test_a_fault_of_layout_is_caught(kernel, words):
    assert_caught(kernel, words)


def takes_the_last_of_equal_scores(gate_logits, *args, **options):
    """Right: the loss doesn't depend on the order of the keys, and on a GPU a top k takes such ones."""
    reversed_keys = tuple(each.flip(2) for each in gate_logits) if isinstance(gate_logits, tuple) else gate_logits
    return load_balancing_loss.product_keys(reversed_keys, *args, **options)


def test_which_of_equal_scores_is_taken_is_left_open():
    logits = torch.randn(1, 9, 4).expand(2, 9, 4).requires_grad_()
    found, wanted = (
        torch.autograd.grad(kernel((logits,), 16, 4, 2), logits)[0]
        for kernel in (takes_the_last_of_equal_scores, load_balancing_loss.product_keys)
    )
    assert not torch.allclose(found, wanted, rtol=0.1)
    assert not failures_of(takes_the_last_of_equal_scores, op="load_balancing_loss", variant="product_keys")


def test_results_that_share_memory_are_caught():
    assert_caught(one_buffer_for_both_results, "two of its results share memory", op="rotary_pos_emb", variant="full")


def hides_nan(gate, up):
    return swiglu_mlp.standard(gate, up).nan_to_num()


def clamps_infinity(gate, up):
    return swiglu_mlp.standard(gate, up).clamp(-1e30, 1e30)


class _HidesInBackward(SwiGLU):
    @staticmethod
    def backward(ctx, upstream):
        return tuple(each.nan_to_num() for each in SwiGLU.backward(ctx, upstream))


def hides_nan_in_backward(gate, up):
    return _HidesInBackward.apply(gate, up)


def spreads_nan(gate, up):
    return swiglu_mlp.standard(gate, up) + 0.0 * gate.sum()


def lets_an_ignored_token_spoil_the_loss(hidden, weight, labels, *args, ignore_index=-100, **options):
    loss = cross_entropy_loss.causal(hidden, weight, labels, *args, ignore_index=ignore_index, **options)
    return loss + 0.0 * (hidden * (labels == ignore_index)[:, None]).sum()


NOT_FINITE = [
    (hides_nan, "with nan as the first element of gate, the result is finite in"),
    (clamps_infinity, "with inf as the first element of gate, the result is finite in"),
    (hides_nan_in_backward, "element of the incoming gradient, the gradient of"),
    (spreads_nan, "places that have nothing to do with it"),
]


@pytest.mark.parametrize("kernel, words", NOT_FINITE, ids=[fault[0].__name__ for fault in NOT_FINITE])
def test_what_becomes_of_nan_and_infinity_is_checked(kernel, words):
    assert_caught(kernel, words)


def test_a_nan_that_an_ignored_token_spreads_is_caught():
    words = "with nan as the first element of hidden, the result is another in 1 places that have nothing to do with it"
    assert_caught(lets_an_ignored_token_spoil_the_loss, words, op="cross_entropy_loss", variant="causal")


def keys_past_64(module, query, key, value, mask, *args, **options):
    short = key.shape[2] > 64
    value = torch.cat((value[:, :, :64], value[:, :, 64:] * 1.01), dim=2) if short else value
    return attention.standard(module, query, key, value, mask, *args, **options)


def head_sizes_past_64(module, query, key, value, mask, scaling=None, **options):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention.standard(module, query[..., :64], key[..., :64], value, mask, scaling, **options)


def fifth_sequence(module, query, key, value, mask, cu_seq_lens_q=None, cu_seq_lens_k=None, **options):
    if cu_seq_lens_q is not None and len(cu_seq_lens_q) > 6:
        both = [torch.cat((bounds[:5], bounds[-1:])) for bounds in (cu_seq_lens_q, cu_seq_lens_k)]
        cu_seq_lens_q, cu_seq_lens_k = both
    bounds = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    return attention.standard(module, query, key, value, mask, **bounds, **options)


def tokens_past_64(hidden, index, weights, gate_up, down):
    ranks = F.one_hot(index.clamp(0, 200), 201).cumsum(0).gather(2, index.clamp(0, 200)[..., None])[..., 0]
    kept = ranks <= 64 if index.shape[1] == 2 and len(index) > 64 else torch.ones_like(index, dtype=torch.bool)
    return moe_experts.standard(hidden, index, weights * kept, gate_up, down)


def columns_past_64(hidden, index, weights, gate_up, down):
    result = moe_experts.standard(hidden, index, weights, gate_up, down)
    return torch.cat((result[:, :64], result[:, 64:] * 1.01), dim=1)


def experts_past_127(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index.to(torch.int8).long(), weights, gate_up, down)


def words_past_4096(hidden, weight, labels, bias=None, **options):
    cut = weight if len(weight) <= 4096 else torch.cat((weight[:4096], weight[4096:].detach()))
    return cross_entropy_loss.causal(hidden, cut, labels, bias, **options)


def columns_past_2048(x, weight, eps):
    width = min(x.shape[-1], 2048)
    scale = torch.rsqrt(x[..., :width].square().mean(-1, keepdim=True) + eps)
    return weight * (x * scale)


def rows_past_65535(gate, up):
    result = swiglu_mlp.standard(gate, up)
    return torch.cat((result[:65_535], torch.zeros_like(result[65_535:]))) if len(result) > 65_535 else result


def positions_past_64(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (torch.cat((x[:, :64], x[:, 63:64].expand_as(x[:, 64:])), dim=1) for x in (cos, sin))
    return rotary_pos_emb.full(q, k, cos, sin, unsqueeze_dim)


def layers_past_3(gate_logits, *args, **options):
    return load_balancing_loss.standard(gate_logits[:3], *args, **options)


def row_of_one_tile_norm(x, weight, eps):
    """The weight's gradient from the first 65535 rows alone."""
    if x.dim() == 2 and len(x) > 65_535:
        first, rest = rms_norm.standard(x[:65_535], weight, eps), rms_norm.standard(x[65_535:], weight.detach(), eps)
        return torch.cat((first, rest))
    return rms_norm.standard(x, weight, eps)


_ATTENTION = {"op": "attention", "features": ("packed", "padding_mask", "sliding_window", "softcap", "sinks")}
_EXPERTS, _NORM = {"op": "moe_experts"}, {"op": "rms_norm"}
BEYOND_A_TILE = [
    (keys_past_64, "sample 'past 128 keys': the result is off", _ATTENTION),
    (head_sizes_past_64, "sample 'past 64 in a head': the result is off", _ATTENTION),
    (fifth_sequence, "sample 'nine packed sequences': the result is off", _ATTENTION),
    (tokens_past_64, "sample 'past 128 tokens and columns of an expert': the result is off", _EXPERTS),
    (columns_past_64, "sample 'past 128 tokens and columns of an expert': the result is off", _EXPERTS),
    (experts_past_127, "sample '193 experts, the last 43 empty': the result is off", _EXPERTS),
    (
        words_past_4096,
        "sample 'past 4096 words': the gradient of weight is off",
        {"op": "cross_entropy_loss", "variant": "causal"},
    ),
    (columns_past_2048, "sample 'past 2048 columns': the result is off", _NORM),
    (row_of_one_tile_norm, "sample 'past 65535 rows': the gradient of weight is off", _NORM),
    (rows_past_65535, "sample 'past 65535 rows': the result is off", {}),
    (positions_past_64, "sample 'past 128 positions': result 0 is off", {"op": "rotary_pos_emb", "variant": "full"}),
    (layers_past_3, "sample 'five layers of 128 experts': the", {"op": "load_balancing_loss"}),
]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("kernel, words, options", BEYOND_A_TILE, ids=[fault[0].__name__ for fault in BEYOND_A_TILE])
def test_a_fault_beyond_one_tile_is_caught_on_a_cpu(kernel, words, options):
    assert_caught(kernel, words, largest=Size.BEYOND_A_TILE, **options)
