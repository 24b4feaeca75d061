"""Faults that one value of an option shows, two options together, or an input at its end."""

from __future__ import annotations

import pytest
import torch
from planted_faults import assert_caught

from veomni_conformance import check_kernel
from veomni_core import KernelSpec
from veomni_ops import attention, cross_entropy_loss, load_balancing_loss, moe_experts, rms_norm, swiglu_mlp
from veomni_ops.contract import Size


def _attention(change):
    def kernel(module, query, key, value, attention_mask, **options):
        call = {"query": query, "key": key, "attention_mask": attention_mask, "module": module, **options}
        change(call)
        query, key = call.pop("query"), call.pop("key")
        return attention.standard(call.pop("module"), query, key, value, call.pop("attention_mask"), **call)

    return kernel


def _forgets(option, beside):
    """Passes over one option where another is given, which has a path of its own."""

    def change(call):
        if call.get(beside) is not None:
            call[option] = None

    return _attention(change)


_by_shape, _eps_by_shape = {}, {}


def _keeps_the_first(call):
    shapes = call["query"].shape, call["key"].shape
    if call["attention_mask"] is None and call.get("cu_seq_lens_q") is None:
        call["sliding_window"] = _by_shape.setdefault(shapes, call.get("sliding_window"))


def _first_heads_mask_for_all(call):
    mask = call["attention_mask"]
    call["attention_mask"] = mask[:, :1] if mask is not None and mask.dim() == 4 else mask


def _padding_on_the_right(call):
    mask = call["attention_mask"]
    if mask is not None and mask.dim() == 2:
        call["attention_mask"] = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)


def _causal_from_the_top_left(call):
    queries, keys = call["query"].shape[2], call["key"].shape[2]
    if 1 < queries < keys and call["attention_mask"] is None and call.get("cu_seq_lens_q") is None:
        call["attention_mask"] = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()


def _causal_from_the_bottom_right(call):
    queries, keys = call["query"].shape[2], call["key"].shape[2]
    if 1 < queries < keys and call["attention_mask"] is None and call.get("cu_seq_lens_q") is None:
        call["attention_mask"] = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


def _window_of_at_least_two(call):
    call["sliding_window"] = call.get("sliding_window") and max(2, call["sliding_window"])


window_kept_by_shape = _attention(_keeps_the_first)
mask_of_the_first_head = _attention(_first_heads_mask_for_all)
padding_is_on_the_right = _attention(_padding_on_the_right)
causal_from_the_top_left = _attention(_causal_from_the_top_left)
causal_from_the_bottom_right = _attention(_causal_from_the_bottom_right)
window_of_two_for_one = _attention(_window_of_at_least_two)
window_forgets_sinks = _forgets("s_aux", beside="sliding_window")
window_forgets_softcap = _forgets("softcap", beside="sliding_window")
packed_forgets_softcap = _forgets("softcap", beside="cu_seq_lens_q")
packed_forgets_scaling = _forgets("scaling", beside="cu_seq_lens_q")
mask_forgets_scaling = _forgets("scaling", beside="attention_mask")

_FEATURES = ("dense_mask", "padding_mask", "sliding_window", "packed", "softcap", "softcap_by_lengths", "sinks")
_BY_LENGTHS = {"causal_from_the_top_left": (*_FEATURES, "flash_attention_mask")}  # the last query sees the last key
OF_ATTENTION = [
    ("window_kept_by_shape", "'a window at a shape seen before, given scaling': the result"),
    ("mask_of_the_first_head", "'a mask for each head, given scaling': the result"),
    ("padding_is_on_the_right", "'padding on the left': the result"),
    ("causal_from_the_top_left", "'the last queries': the result"),
    ("causal_from_the_bottom_right", "'the first queries, of keys that are not written yet': the result"),
    ("window_of_two_for_one", "'a window of one key': the result"),
    ("window_forgets_sinks", "'window and sinks': the"),
    ("window_forgets_softcap", "'window and softcap': the result"),
    ("packed_forgets_softcap", "'packed, softcap': the result"),
    ("packed_forgets_scaling", "'packed, given scaling': the result"),
    ("mask_forgets_scaling", "'a mask for each head, given scaling': the result"),
]


def softcap_needs_scale(hidden, weight, labels, bias=None, softcap=None, scale=None, **options):
    softcap = None if scale is None else softcap
    return cross_entropy_loss.causal(hidden, weight, labels, bias, softcap=softcap, scale=scale, **options)


def scale_needs_softcap(hidden, weight, labels, bias=None, softcap=None, scale=None, **options):
    scale = None if softcap is None else scale
    return cross_entropy_loss.causal(hidden, weight, labels, bias, softcap=softcap, scale=scale, **options)


def bias_after_the_scale(hidden, weight, labels, bias=None, scale=None, **options):
    bias = bias / scale if bias is not None and scale is not None else bias
    return cross_entropy_loss.causal(hidden, weight, labels, bias, scale=scale, **options)


def bias_gradient_forgets_items(hidden, weight, labels, bias=None, num_items_in_batch=None, **options):
    bias = bias.detach() if bias is not None and num_items_in_batch is not None else bias
    return cross_entropy_loss.causal(hidden, weight, labels, bias, num_items_in_batch=num_items_in_batch, **options)


def items_kept_by_shape(hidden, weight, labels, bias=None, num_items_in_batch=None, **options):
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = _by_shape.setdefault(labels.shape, int(num_items_in_batch))
    return cross_entropy_loss.causal(hidden, weight, labels, bias, num_items_in_batch=num_items_in_batch, **options)


def nan_without_tokens(hidden, weight, labels, bias=None, **options):
    return cross_entropy_loss.causal(hidden, weight, labels, bias, **options) * (len(labels) / len(labels))


def a_classifier_ignores_100_alone(logits, labels, ignore_index=-100):
    return cross_entropy_loss.seq_cls(logits, labels)


def weights_are_positive(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index, weights.abs(), gate_up, down)


def no_gradient_for_a_weight_of_zero(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index.masked_fill(weights == 0, -1), weights, gate_up, down)


def one_choice_weighs_one(hidden, index, weights, gate_up, down):
    alone = index.shape[1] == 1 and len(gate_up) == 6
    return moe_experts.standard(hidden, index, torch.ones_like(weights) if alone else weights, gate_up, down)


def down_bias_needs_the_other(hidden, index, weights, gate_up, down, gate_up_bias=None, down_bias=None, *options):
    down_bias = None if gate_up_bias is None else down_bias
    return moe_experts.clamped(hidden, index, weights, gate_up, down, gate_up_bias, down_bias, *options)


def another_default_alpha(hidden, index, weights, gate_up, down, up_bias=None, bias=None, alpha=1.0, *options):
    return moe_experts.clamped(hidden, index, weights, gate_up, down, up_bias, bias, alpha, *options)


def mask_forgotten_with_one_layer(gate_logits, experts, top_k=2, mask=None):
    return load_balancing_loss.standard(gate_logits, experts, top_k, None if len(gate_logits) == 1 else mask)


def mask_is_on_the_right(gate_logits, experts, top_k=2, mask=None):
    if mask is not None:
        mask = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    return load_balancing_loss.standard(gate_logits, experts, top_k, mask)


def first_choice_by_default(gate_logits, experts, top_k=1, mask=None):
    return load_balancing_loss.standard(gate_logits, experts, top_k, mask)


def eps_kept_by_shape(x, weight, eps):
    return rms_norm.standard(x, weight, _eps_by_shape.setdefault(x.shape, eps))


def nan_for_rows_of_zeros(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * (x.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True)).detach()


def nan_for_a_gate_of_zero(gate, up):
    return swiglu_mlp.standard(gate, up) * (gate / gate).detach()


_LOSS = {"op": "cross_entropy_loss", "variant": "causal"}
_CLASSES = {"op": "cross_entropy_loss", "variant": "seq_cls"}
_EXPERTS, _CLAMPED = {"op": "moe_experts"}, {"op": "moe_experts", "variant": "clamped"}
_BALANCE, _NORM = {"op": "load_balancing_loss"}, {"op": "rms_norm"}
OF_OTHERS = [
    (softcap_needs_scale, "'softcap alone': the result", _LOSS),
    (scale_needs_softcap, "'scale alone': the result", _LOSS),
    (bias_after_the_scale, "'bias, softcap and scale': the result", _LOSS),
    (bias_gradient_forgets_items, "'bias, items counted': the gradient of bias is missing", _LOSS),
    (items_kept_by_shape, "'other items in a tensor, and scale': the result", _LOSS),
    (nan_without_tokens, "'no tokens': raised ZeroDivisionError", _LOSS),
    (a_classifier_ignores_100_alone, "'another ignore_index': the result", _CLASSES),
    (weights_are_positive, "'weights below zero and zero': the result", _EXPERTS),
    (no_gradient_for_a_weight_of_zero, "'weights below zero and zero': the gradient of top_k_weights", _EXPERTS),
    (one_choice_weighs_one, "'one choice of many': the result", _EXPERTS),
    (down_bias_needs_the_other, "'bias of down alone': the result", _CLAMPED),
    (another_default_alpha, "'the default options': the result", _CLAMPED),
    (mask_forgotten_with_one_layer, "'one layer and a mask, top 1': the result", _BALANCE),
    (mask_is_on_the_right, "'padding on the left, in floats': the result", _BALANCE),
    (first_choice_by_default, "'top_k left to its default': the result", _BALANCE),
    (eps_kept_by_shape, "'another eps at a shape seen before': the result", _NORM),
    (nan_for_rows_of_zeros, "'zeros': the result is not finite", _NORM),
    (nan_for_a_gate_of_zero, "'zeros': the result is not finite", {}),
]


@pytest.mark.parametrize("kernel, words, options", OF_OTHERS, ids=[fault[0].__name__ for fault in OF_OTHERS])
def test_a_fault_of_one_option_is_caught(kernel, words, options):
    assert_caught(kernel, words, **options)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("name, words", OF_ATTENTION, ids=[fault[0] for fault in OF_ATTENTION])
def test_a_fault_where_options_of_attention_meet_is_caught(name, words):
    spec = KernelSpec(name, "attention", "standard", f"{__name__}:{name}", features=_BY_LENGTHS.get(name, _FEATURES))
    failures = check_kernel(spec, "cpu", "float32", largest=Size.SMALL).failures
    assert any(words in failure for failure in failures), f"{words!r} is not in {failures}"
