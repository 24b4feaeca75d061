"""Kernels that are wrong for one kind of call alone: each is caught, since a sample of its contract is of that kind.

The kinds are widths, groups, lengths, boundaries, states, and tensors that are two arguments at once.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from planted_faults import assert_caught, failures_of
from torch.nn import functional as F

from veomni_ops import (
    attention,
    causal_conv1d,
    chunk_gated_delta_rule,
    kda,
    mamba2_scan,
    rms_norm,
    rms_norm_gated,
    rotary_pos_emb,
    selective_scan,
    token_dispatch,
)
from veomni_ops import rotary_pos_emb_vision as vision
from veomni_ops.contract import Size


def _attention(change):
    """The reference, for a call that ``change`` has written over."""

    def kernel(module, query, key, value, attention_mask, **options):
        call = {"query": query, "key": key, "value": value, "attention_mask": attention_mask, **options}
        change(call, module)
        return attention.standard(module, **call)

    kernel.__name__ = change.__name__
    return kernel


@_attention
def scaled_by_the_padded_width(call, module):
    width = call["query"].shape[-1]
    if call.get("scaling") is None:
        call["scaling"] = (1 << (width - 1).bit_length()) ** -0.5


@_attention
def eight_groups_interleaved(call, module):
    query, groups = call["query"], module.num_key_value_groups
    if groups >= 8:
        call["query"] = query.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)


@_attention
def values_as_wide_as_queries(call, module):
    value, width = call["value"], call["query"].shape[-1]
    if value.shape[-1] > width:
        call["value"] = F.pad(value[..., :width], (0, value.shape[-1] - width))


@_attention
def values_have_no_gradient_as_keys(call, module):
    if call["key"] is call["value"]:
        call["value"] = call["value"].detach()


@_attention
def a_window_and_padding_leave_no_softcap(call, module):
    mask = call["attention_mask"]
    if call.get("sliding_window") and mask is not None and mask.dim() == 2:
        call["softcap"] = None


@_attention
def a_window_and_packing_leave_no_sinks(call, module):
    if call.get("sliding_window") and call.get("cu_seq_lens_q") is not None:
        call["s_aux"] = None


@_attention
def a_softcap_leaves_no_sinks(call, module):
    if call.get("softcap"):
        call["s_aux"] = None


def padding_of_a_whole_sequence_gives_nan(module, query, key, value, attention_mask, **options):
    output, weights = attention.standard(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.dim() == 2:
        output = torch.where(attention_mask.any(1)[:, None, None, None], output, float("nan"))
    return output, weights


@_attention
def sequences_end_at_an_empty_one(call, module):
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (bounds := call.get(name)) is not None:
            count = int((bounds.diff() > 0).long().cumprod(0).sum())
            call[name] = torch.cat((bounds[: count + 1], bounds[-1:]))


@_attention
def a_window_is_shorter_than_the_sequence(call, module):
    if call.get("sliding_window"):
        call["sliding_window"] = min(call["sliding_window"], call["key"].shape[2] - 1)


@_attention
def rows_are_read_in_pairs(call, module):
    if len(call["value"]) == 3:
        call["value"] = torch.cat((call["value"][:2], call["value"][:1]))


@_attention
def strides_follow_from_shapes(call, module):
    query = call["query"]
    if query.stride(0) < query.stride(1):
        raise ValueError("query must be contiguous")


@_attention
def the_lowest_number_hides_a_whole_row(call, module):
    mask = call["attention_mask"]
    if mask is not None and mask.is_floating_point():
        hidden = (mask == torch.finfo(mask.dtype).min).all(-1)  # [B, 1 or H, S]
        call["attention_mask"] = mask.masked_fill(hidden[..., None], 0.0)


@_attention
def a_last_tile_of_one_key_is_dropped(call, module):
    length = call["key"].shape[2]
    if length > 64 and length % 64 == 1:
        call["value"] = torch.cat((call["value"][:, :, :-1], torch.zeros_like(call["value"][:, :, -1:])), dim=2)


@_attention
def one_query_ignores_its_mask(call, module):
    if call["query"].shape[2] == 1:
        call["attention_mask"] = None


@_attention
def a_window_leaves_no_softcap_where_nothing_is_recorded(call, module):
    if call.get("sliding_window") and not torch.is_grad_enabled():
        call["softcap"] = None


@_attention
def added_masks_hide_or_keep(call, module):
    mask = call["attention_mask"]
    if mask is not None and mask.is_floating_point():
        call["attention_mask"] = mask.masked_fill(mask > torch.finfo(mask.dtype).min / 2, 0.0)


def angles_of_zero_give_the_queries(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_pos_emb.full(q, k, cos, sin, unsqueeze_dim) if sin.any() else (q, k)


def half_of_a_head_is_rotated(q, k, cos, sin, unsqueeze_dim=1):
    half = q.shape[-1] // 4
    if cos.shape[-1] > 2 * half:
        cos, sin = (torch.cat((x[..., :half], x[..., :half]), dim=-1) for x in (cos, sin))
    return rotary_pos_emb.partial(q, k, cos, sin, unsqueeze_dim)


def trained_angles_stop_gradients(q, k, cos, sin, unsqueeze_dim=1):
    return rotary_pos_emb.full(q.detach() if cos.requires_grad else q, k, cos, sin, unsqueeze_dim)


def pairs_in_vectors_of_four(q, k, cos, sin, unsqueeze_dim=1):
    turned, whole = rotary_pos_emb.pairwise(q, k, cos, sin, unsqueeze_dim), q.shape[-1] // 4 * 4
    return tuple(torch.cat((t[..., :whole], x[..., whole:]), dim=-1) for t, x in zip(turned, (q, k), strict=True))


def queries_are_rotated_in_place(q, k, cos, sin, unsqueeze_dim=1):
    turned, keys = rotary_pos_emb.full(q, k, cos, sin, unsqueeze_dim)
    if q is k:
        keys = rotary_pos_emb.full(keys, keys, cos, sin, unsqueeze_dim)[0]
    return turned, keys


def a_last_tile_of_one_position_is_copied(q, k, cos, sin, unsqueeze_dim=1):
    length = cos.shape[1]
    if length > 64 and length % 64 == 1:
        cos = torch.cat((cos[:, :-1], torch.ones_like(cos[:, -1:])), dim=1)
    return rotary_pos_emb.full(q, k, cos, sin, unsqueeze_dim)


def the_first_of_two_leading_dimensions(q, k, cos, sin):
    turned = vision.full(q, k, cos, sin)
    if q.dim() == 5:
        turned = tuple(x[:1].expand_as(x).clone() for x in turned)
    return turned


def numbers_rise_by_one(x, weight, bias=None, activation=None, seq_idx=None):
    if seq_idx is not None:
        begins = F.pad(seq_idx.diff(dim=1), (1, 0)) == 1
        seq_idx = begins.cumsum(1)
    return causal_conv1d.standard(x, weight, bias, activation, seq_idx)


def four_taps_of_packed_rows(x, weight, bias=None, activation=None, seq_idx=None):
    if seq_idx is not None and weight.shape[1] > 4:
        weight = F.pad(weight[:, -4:], (weight.shape[1] - 4, 0))
    return causal_conv1d.standard(x, weight, bias, activation, seq_idx)


def one_channel_is_squeezed(x, weight, bias=None, activation=None, seq_idx=None):
    result = causal_conv1d.standard(x, weight, bias, activation, seq_idx)
    return result.squeeze(1) if x.shape[1] == 1 else result


def a_last_whole_tile_of_channels_is_dropped(x, weight, bias=None, activation=None, seq_idx=None):
    result = causal_conv1d.standard(x, weight, bias, activation, seq_idx)
    if x.shape[1] > 1024 and x.shape[1] % 256 == 0:
        result = torch.cat((result[:, :-256], torch.zeros_like(result[:, -256:])), dim=1)
    return result


def _recurrence(reference):
    """A decorator: the reference of a recurrence, for a call that the decorated function has written over."""
    names = [*inspect.signature(reference).parameters]

    def decorator(change):
        def kernel(*args, **options):
            call = {**dict(zip(names, args, strict=False)), **options}
            change(call)
            return reference(**call)

        kernel.__name__ = change.__name__
        return kernel

    return decorator


_delta, _kda, _scan, _selective = map(
    _recurrence, (chunk_gated_delta_rule.standard, kda.standard, mamba2_scan.standard, selective_scan.standard)
)


@_delta
def no_state_is_read_where_none_is_kept(call):
    if not call.get("output_final_state"):
        call["initial_state"] = None


@_kda
def no_state_of_kda_is_read_where_none_is_kept(call):
    if not call.get("output_final_state"):
        call["initial_state"] = None


@_delta
def four_states_of_packed_sequences(call):
    state = call.get("initial_state")
    if call.get("cu_seqlens") is not None and state is not None and len(state) > 4:
        call["initial_state"] = torch.cat((state[:4], torch.zeros_like(state[4:])))


@_delta
def five_chunks(call):
    if call["query"].shape[1] > 320:
        rest = call["beta"][:, 320:]
        call["beta"] = torch.cat((call["beta"][:, :320], torch.zeros_like(rest)), dim=1)


@_delta
def queries_have_no_gradient_as_keys(call):
    if call["query"] is call["key"]:
        call["query"] = call["query"].detach()


@_delta
def groups_of_at_most_four(call):
    value = call["value"]
    if value.shape[2] // call["query"].shape[2] > 4:
        call["value"] = torch.cat((value[:, :, :4], torch.zeros_like(value[:, :, 4:])), dim=2)


@_delta
def gates_of_packed_rows_are_cumulated(call):
    """As a kernel that divides by decays cumulated over the whole row: infinite where much is forgotten."""
    if call.get("cu_seqlens") is not None:
        lost = (-call["g"].cumsum(1)).exp()
        call["value"] = call["value"] * (lost / lost).unsqueeze(-1).to(call["value"].dtype)


@_delta
def packed_sequences_ignore_the_scale(call):
    if call.get("cu_seqlens") is not None:
        call["scale"] = None


@_kda
def keys_are_divided_by_their_norm_alone(call):
    if call.get("use_qk_l2norm_in_kernel"):
        call["use_qk_l2norm_in_kernel"] = False
        call["query"], call["key"] = (F.normalize(call[name], dim=-1) for name in ("query", "key"))


@_scan
def a_bias_needs_softplus(call):
    if not call.get("dt_softplus"):
        call["dt_bias"] = None


@_scan
def no_state_of_a_scan_is_read_where_none_is_kept(call):
    if not call.get("return_final_states"):
        call["initial_states"] = None


@_scan
def numbers_of_a_scan_rise_by_one(call):
    numbers = call.get("seq_idx")
    if numbers is not None:
        call["seq_idx"] = F.pad((numbers.diff(dim=1) == 1).cumsum(1), (1, 0))


@_scan
def states_are_read_in_pairs(call):
    states = call.get("initial_states")
    if states is not None and len(states) == 3:
        call["initial_states"] = torch.cat((states[:2], states[:1]))


@_scan
def reads_have_no_gradient_as_writes(call):
    if call["B"] is call["C"]:
        call["C"] = call["C"].detach()


def eight_choices(hidden, top_k_index, top_k_weights, experts, ranks):
    return token_dispatch.exchanged(hidden, top_k_index[:, :8], top_k_weights[:, :8], experts, ranks)


def eps_of_a_millionth_at_least(x, weight, eps):
    return rms_norm.standard(x, weight, max(eps, 1e-6))


def eps_of_a_gated_norm_of_a_millionth_at_least(x, gate, weight, eps, group_size=None):
    return rms_norm_gated.standard(x, gate, weight, max(eps, 1e-6), group_size)


_ATTENTION = {
    "op": "attention",
    "features": (
        *("dense_mask", "padding_mask", "sliding_window", "packed", "softcap", "softcap_by_lengths", "sinks"),
        *("wide_heads", "odd_heads"),
    ),
}
_CONVOLUTION = {"op": "causal_conv1d", "features": ("any_width",)}
_DELTA = {"op": "chunk_gated_delta_rule", "features": ("wide_heads",)}
_SCAN, _SELECTIVE = {"op": "mamba2_scan"}, {"op": "selective_scan"}
_VISION = {"op": "rotary_pos_emb_vision", "variant": "full"}


def _rotary(variant):
    return {"op": "rotary_pos_emb", "variant": variant}


@_selective
def a_gate_needs_no_gradient(call):
    call["z"] = None if call.get("z") is None else call["z"].detach()


@_selective
def sixty_four_tokens_of_packed_rows(call):
    if call.get("seq_idx") is not None and call["x"].shape[2] > 128:
        call["seq_idx"] = call["seq_idx"].clone()
        call["seq_idx"][:, 128:] = call["seq_idx"][:, 128:129]


@_selective
def a_bias_of_channels_needs_softplus(call):
    if not call.get("dt_softplus"):
        call["dt_bias"] = None


# Each kernel, what of a failure's sentence names the sample that finds it, and the options of its spec.
FAULTS = [
    (eps_of_a_millionth_at_least, "'small values, and an eps below theirs': the result", {"op": "rms_norm"}),
    (
        eps_of_a_gated_norm_of_a_millionth_at_least,
        "'small values, and an eps below theirs': the result",
        {"op": "rms_norm_gated"},
    ),
    (scaled_by_the_padded_width, "'values wider than queries': the result", _ATTENTION),
    (eight_groups_interleaved, "'a key that is the value': the result", _ATTENTION),
    (values_as_wide_as_queries, "'values wider than queries': the result", _ATTENTION),
    (values_have_no_gradient_as_keys, "'a key that is the value': the gradient of", _ATTENTION),
    (a_window_and_padding_leave_no_softcap, "'padding, window and softcap': the result", _ATTENTION),
    (a_window_and_packing_leave_no_sinks, "'packed, window and sinks': the", _ATTENTION),
    (a_softcap_leaves_no_sinks, "'softcap and sinks': the", _ATTENTION),
    (padding_of_a_whole_sequence_gives_nan, "'padding on the left': the result is not finite", _ATTENTION),
    (sequences_end_at_an_empty_one, "'packed sequences': the result", _ATTENTION),
    (a_window_is_shorter_than_the_sequence, "'a window as long as the sequence, softcap': the result", _ATTENTION),
    (rows_are_read_in_pairs, "'groups of three': the result", _ATTENTION),
    (strides_follow_from_shapes, "'packed, one sequence': raised ValueError", _ATTENTION),
    (the_lowest_number_hides_a_whole_row, "'an added mask, rows without keys': the result", _ATTENTION),
    (a_last_tile_of_one_key_is_dropped, "'past 64 keys': the result", _ATTENTION),
    (one_query_ignores_its_mask, "'a mask of one query': the result", _ATTENTION),
    (a_window_leaves_no_softcap_where_nothing_is_recorded, "under torch.no_grad(), the result", _ATTENTION),
    (added_masks_hide_or_keep, "'an added mask of numbers for each head': the result", _ATTENTION),
    (angles_of_zero_give_the_queries, "'results equal to the heads': its result shares memory", _rotary("full")),
    (half_of_a_head_is_rotated, "result 0 is off", _rotary("partial")),
    (trained_angles_stop_gradients, "'angles that want gradients': the gradient of q", _rotary("full")),
    (pairs_in_vectors_of_four, "'pairs that fill no vector': result 0", _rotary("pairwise")),
    (queries_are_rotated_in_place, "'queries that are the keys': result 1", _rotary("full")),
    (a_last_tile_of_one_position_is_copied, "'past 64 positions': result 0", _rotary("full")),
    (the_first_of_two_leading_dimensions, "'five dimensions': result 0", _VISION),
    (numbers_rise_by_one, "'packed rows, numbers with gaps': the result", _CONVOLUTION),
    (four_taps_of_packed_rows, "'six positions, packed': the result", _CONVOLUTION),
    (one_channel_is_squeezed, "'one channel, past 64 positions': gives shape", _CONVOLUTION),
    (a_last_whole_tile_of_channels_is_dropped, "'1280 channels': the result", _CONVOLUTION),
    (no_state_is_read_where_none_is_kept, "'an initial state alone': the", _DELTA),
    (four_states_of_packed_sequences, "'packed, both states': ", _DELTA),
    (five_chunks, "'packed, six chunks': result 0", _DELTA),
    (queries_have_no_gradient_as_keys, "'queries that are the keys': the gradient of", _DELTA),
    (groups_of_at_most_four, "'grouped heads': the", _DELTA),
    (gates_of_packed_rows_are_cumulated, "'packed without states': the result", _DELTA),
    (packed_sequences_ignore_the_scale, "'packed at 63, 64, 65, 131': result 0", _DELTA),
    (keys_are_divided_by_their_norm_alone, "'another scale, and small keys': the result", {**_DELTA, "op": "kda"}),
    (a_bias_needs_softplus, "'time steps as they come, a bias and limits': result 0", _SCAN),
    (no_state_of_kda_is_read_where_none_is_kept, "'packed, an initial state alone': the", {**_DELTA, "op": "kda"}),
    (no_state_of_a_scan_is_read_where_none_is_kept, "'initial states alone': the", _SCAN),
    (numbers_of_a_scan_rise_by_one, "'sequences whose numbers fall': ", _SCAN),
    (states_are_read_in_pairs, "'packed, both states': ", _SCAN),
    (reads_have_no_gradient_as_writes, "'reads what it writes': the gradient of", _SCAN),
    (a_gate_needs_no_gradient, "'odd sizes': the gradient of", _SELECTIVE),
    (sixty_four_tokens_of_packed_rows, "'packed, of 64, 64, 1, 2, 3': ", _SELECTIVE),
    (a_bias_of_channels_needs_softplus, "'time steps as they come, and a bias': result 0", _SELECTIVE),
]  # fmt: skip


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize(
    "op, kernel, words, options",
    [pytest.param(options["op"], kernel, words, options, id=kernel.__name__) for kernel, words, options in FAULTS],
)
def test_a_fault_of_one_kind_of_call_is_caught(op, kernel, words, options):
    assert_caught(kernel, words, largest=Size.BEYOND_A_TILE, **options)


@pytest.mark.thorough
def test_a_ninth_choice_that_is_dropped_is_caught():
    failures = failures_of(eight_choices, "token_dispatch", "exchanged")
    assert any("'65 tokens of nine choices': rank 0: the result is off" in failure for failure in failures), failures
