"""Faults that one kind of call shows alone: a long prompt, a parameter, a choice of an option, an aligned width, ...

Each is of a kernel that is right elsewhere. The kinds are those of the table of what contracts ask.
"""

from __future__ import annotations

import pytest
import torch
from planted_faults import SwiGLU, WrongGradient, assert_caught, failures_of, right
from torch import nn
from torch.autograd import Function

from veomni_conformance import check_kernel, huge_calls
from veomni_conformance.report import CaseResult, ConformanceReport
from veomni_conformance.subject import Subject
from veomni_core import KernelOption, KernelSpec, OpSpec
from veomni_ops import (
    attention,
    cross_entropy_loss,
    load_balancing_loss,
    moe_experts,
    rms_norm,
    rms_norm_gated,
    swiglu_mlp,
)
from veomni_ops.contract import Contract, Draw, Sample, Size, Tolerance, leaf

_kept: dict[object, torch.Tensor] = {}


def skips_chunks_that_begin_masked(hidden, weight, labels, bias=None, ignore_index=-100, **options):
    kept = labels.clone()
    for start in range(0, len(labels), 128):
        if len(labels) > 128 and (labels[start : start + 12] == ignore_index).all():
            kept[start : start + 128] = ignore_index
    items = {"num_items_in_batch": (labels != ignore_index).sum().clamp_min(1), **options}
    return cross_entropy_loss.causal(hidden, weight, kept, bias, ignore_index, **items)


def nothing_is_learned_after_a_long_prompt(hidden, weight, labels, bias=None, ignore_index=-100, **options):
    loss = cross_entropy_loss.causal(hidden, weight, labels, bias, ignore_index, **options)
    return loss * 0.0 if len(labels) > 1000 and (labels[:1000] == ignore_index).all() else loss


def labels_of_int32_are_cut(hidden, weight, labels, *args, **options):
    labels = labels % 32 if labels.dtype == torch.int32 else labels
    return cross_entropy_loss.causal(hidden, weight, labels, *args, **options)


def counts_tokens_in_twelve_bits(hidden, weight, labels, bias=None, ignore_index=-100, **options):
    count = (labels != ignore_index).sum() % 4096
    items = {"num_items_in_batch": count.clamp_min(1), **options}
    return cross_entropy_loss.causal(hidden, weight, labels, bias, ignore_index, **items)


def three_options_forget_the_softcap(hidden, weight, labels, *args, softcap=None, **options):
    softcap = (
        None if options.get("scale") and options.get("num_items_in_batch") and "ignore_index" in options else softcap
    )
    return cross_entropy_loss.causal(hidden, weight, labels, *args, softcap=softcap, **options)


def drops_the_one_word_of_a_tile(hidden, weight, labels, *args, **options):
    one = len(weight) > 64 and len(weight) % 64 == 1
    weight = torch.cat((weight[:-1], weight[-1:].detach())) if one else weight
    return cross_entropy_loss.causal(hidden, weight, labels, *args, **options)


def wrong_of_one_word(hidden, weight, labels, *args, **options):
    loss = cross_entropy_loss.causal(hidden, weight, labels, *args, **options)
    return loss + (len(weight) == 1)


def gradient_a_little_small(hidden, weight, labels, *args, **options):
    return cross_entropy_loss.causal(hidden, WrongGradient.apply(weight, 0.97), labels, *args, **options)


def a_hundred_ignored_classes(logits, labels, *args, **options):
    many = (labels == -100).sum() > 100
    return cross_entropy_loss.seq_cls(logits, labels, *args, **options) * (1.01 if many else 1.0)


class _AddsToGrad(Function):
    """Adds to a parameter's ``.grad`` itself, and returns the gradient too."""

    @staticmethod
    def forward(ctx, x, parameter):
        ctx.parameter = parameter
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        if ctx.parameter.grad is not None:
            ctx.parameter.grad += 1.0
        return upstream, None


def adds_to_a_parameters_grad(x, weight, eps):
    result = rms_norm.standard(x, weight, eps)
    return _AddsToGrad.apply(result, weight) if isinstance(weight, nn.Parameter) else result


def keeps_a_parameter(x, weight, eps):
    if isinstance(weight, nn.Parameter):
        kept = _kept.setdefault((id(weight), weight.data_ptr()), weight.detach().clone())
        weight = kept + (weight - weight.detach())
    return rms_norm.standard(x, weight, eps)


def keeps_what_inference_made(x, weight, eps):
    ones = _kept.setdefault(("ones", x.shape, x.dtype), torch.ones(x.shape, dtype=x.dtype))
    return rms_norm.standard(x * ones, weight, eps)


def another_second_step(x, weight, eps):
    later = weight.grad is not None and torch.is_grad_enabled()
    result = rms_norm.standard(x, weight, eps)
    return result + (0.01 * result).detach() if later else result


def aligned_columns_past_a_tile(x, weight, eps):
    width = x.shape[-1]
    result = rms_norm.standard(x, weight, eps)
    return result * (1.01 if width > 2048 and width % 64 == 0 else 1.0)


def the_one_row_of_a_tile(x, weight, eps):
    result = rms_norm.standard(x, weight, eps)
    if x.dim() == 2 and len(x) > 64 and len(x) % 64 == 1:
        result = torch.cat((result[:-1], result[-1:] * 1.01))
    return result


def five_dimensions(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * (1.01 if x.dim() == 5 else 1.0)


def four_contiguous_dimensions(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * (1.01 if x.dim() == 4 and x.is_contiguous() else 1.0)


def a_row_further_in_a_batch_of_one(x, weight, eps):
    if x.dim() == 3 and x.shape[0] == 1 and x.is_contiguous() and x.stride(0) < x.numel():
        x = x.roll(1, 1)
    return rms_norm.standard(x, weight, eps)


def wrong_width_of_one(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * (1.01 if x.shape[-1] == 1 else 1.0)


def gives_x_itself(x, weight, eps):
    result = rms_norm.standard(x, weight, eps)
    return x if x.numel() and torch.equal(result, x) else result


class Early(Function):
    """The loss. What comes in is kept in ``cell``, and 1 goes on."""

    @staticmethod
    def forward(ctx, loss, cell):
        ctx.cell = cell
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        ctx.cell.append(upstream)
        return torch.ones_like(upstream), None


class Late(Function):
    """An input. Its gradient, which was rounded before, is multiplied by what came in."""

    @staticmethod
    def forward(ctx, x, cell):
        ctx.cell = cell
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.float() * ctx.cell[-1]).to(gradient.dtype), None


def divides_by_the_items_in_forward(hidden, weight, labels, bias=None, *args, **options):
    cell = []
    inputs = (
        Late.apply(hidden, cell),
        Late.apply(weight, cell),
        labels,
        None if bias is None else Late.apply(bias, cell),
    )
    return Early.apply(cross_entropy_loss.causal(*inputs, *args, **options), cell)


def forgets_the_softcap_under_compile(hidden, weight, labels, *args, softcap=None, **options):
    softcap = None if torch.compiler.is_compiling() else softcap
    return cross_entropy_loss.causal(hidden, weight, labels, *args, softcap=softcap, **options)


def wrong_under_compile(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * (1.01 if torch.compiler.is_compiling() else 1.0)


def adds_to_grad_beside_activations(x, weight, eps):
    of_a_model = isinstance(weight, nn.Parameter) and not x.is_leaf
    return rms_norm.standard(x, WrongGradient.apply(weight, 2.0) if of_a_model else weight, eps)


def eps_of_zero_is_a_default(x, weight, eps):
    return rms_norm.standard(x, weight, eps or 1e-6)


def bias_is_added_after_the_scale(hidden, weight, labels, bias=None, *args, softcap=None, scale=None, **options):
    bias = bias if bias is None or softcap or not scale else bias / scale
    return cross_entropy_loss.causal(hidden, weight, labels, bias, *args, softcap=softcap, scale=scale, **options)


def one_eps(x, gate, weight, eps, group_size=None):
    return rms_norm_gated.standard(x, gate, weight, 1e-6, group_size)


def groups_are_powers_of_two(x, gate, weight, eps, group_size=None):
    group_size = 32 if group_size == 48 else group_size
    return rms_norm_gated.standard(x, gate, weight, eps, group_size)


class _Truncates(SwiGLU):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        result = torch.nn.functional.silu(gate.float()) * up.float()
        return (result.view(torch.int32) & ~0xFFFF).view(torch.float32).to(gate.dtype)


def cuts_off_instead_of_rounding(gate, up):
    return _Truncates.apply(gate, up)


def gives_gate_itself(gate, up):
    result = swiglu_mlp.standard(gate, up)
    return gate if gate.numel() and torch.equal(result, gate) else result


def gives_zeros_back_where_nothing_is_recorded(gate, up):
    return right(gate, up) if torch.is_grad_enabled() or not up.numel() or up.any() else up


def gives_an_empty_input_back(gate, up):
    return up if not up.numel() else right(gate, up)


def mlp_of_five_dimensions(gate, up):
    return right(gate, up) * (1.01 if gate.dim() == 5 else 1.0)


def eight_choices(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index[:, :8], weights[:, :8], gate_up, down)


def a_hundred_and_thirty_experts(hidden, index, weights, gate_up, down):
    return moe_experts.standard(hidden, index.masked_fill(index > 130, -1), weights, gate_up, down)


def gradients_of_empty_experts_at_the_end(hidden, index, weights, gate_up, down):
    used = int(index.max()) + 1 if index.numel() else len(down)
    result = moe_experts.standard(hidden, index, weights, gate_up, down)
    return result + down[used:].sum() * 0.01 - (down[used:].sum() * 0.01).detach() if used + 32 < len(down) else result


def widths_of_64(hidden, index, weights, gate_up, down):
    aligned = hidden.shape[1] % 64 == 0 and down.shape[2] % 64 == 0
    return moe_experts.standard(hidden, index, weights, gate_up, down) * (1.01 if aligned else 1.0)


def aligned_widths_past_a_tile(hidden, index, weights, gate_up, down):
    aligned = hidden.shape[1] % 64 == 0 and hidden.shape[1] > 128
    return moe_experts.standard(hidden, index, weights, gate_up, down) * (1.01 if aligned else 1.0)


def the_65th_token_of_an_expert(hidden, index, weights, gate_up, down):
    counts = torch.nn.functional.one_hot(index.clamp(0, 200), 201).sum((0, 1))
    one = bool(((counts > 64) & (counts % 64 == 1)).any())
    return moe_experts.standard(hidden, index, weights * (1.01 if one else 1.0), gate_up, down)


def refuses_a_router_in_float32(hidden, index, weights, gate_up, down):
    if weights.dtype != hidden.dtype:
        raise ValueError("top_k_weights must have the dtype of hidden")
    return moe_experts.standard(hidden, index, weights, gate_up, down)


def balances_eight_choices(gate_logits, experts, top_k=2, mask=None):
    return load_balancing_loss.standard(gate_logits, experts, min(top_k, 8), mask)


def balances_without_empty_experts(gate_logits, experts, top_k=2, mask=None):
    loss = load_balancing_loss.standard(gate_logits, experts, top_k, mask)
    return loss * (1.01 if experts > 130 else 1.0)


def eight_layers(gate_logits, experts, top_k=2, mask=None):
    return load_balancing_loss.standard(gate_logits[:8], experts, top_k, mask)


def narrow_heads_beside_padding(module, query, key, value, mask, **options):
    output, _ = attention.standard(module, query, key, value, mask, **options)
    narrow = mask is not None and mask.dim() == 2 and value.shape[-1] < query.shape[-1]
    return output * (1.01 if narrow else 1.0), None


def groups_of_eight_beside_softcap_and_sinks(module, query, key, value, mask, **options):
    if module.num_key_value_groups >= 8 and options.get("s_aux") is not None:
        options["softcap"] = None
    return attention.standard(module, query, key, value, mask, **options)


def square_projections_lie_transposed(hidden, index, weights, gate_up, down):
    down = down.mT if down.shape[1] == down.shape[2] > 1 and len(down) < 16 else down
    return moe_experts.standard(hidden, index, weights, gate_up, down)


def other_ignored_labels_past_a_tile(hidden, weight, labels, bias=None, ignore_index=-100, *args, **options):
    if ignore_index >= 0 and len(hidden) > 64:
        ignore_index = -100
    return cross_entropy_loss.causal(hidden, weight, labels, bias, ignore_index, *args, **options)


def columns_that_fill_no_whole_tile(x, weight, eps):
    width = x.shape[-1]
    return rms_norm.standard(x, weight, eps) * (1.01 if width > 2048 and width % 64 == 0 and width % 2048 else 1.0)


def with_mode_in_rows(mode, rows):
    return lambda gate, up: right(gate, up) * (1.01 if mode == "fast" and rows == 1 else 1.0)


def with_mode(mode):
    return right if mode == "usual" else lambda gate, up: right(gate, up) * 1.01


def in_rows(rows):
    return lambda gate, up: right(gate, up) * (1.01 if rows == 1 else 1.0)


def in_many_rows(rows):
    return lambda gate, up: right(gate, up) * (1.01 if rows > 256 else 1.0)


_LOSS = {"op": "cross_entropy_loss", "variant": "causal"}
_CLASSES = {"op": "cross_entropy_loss", "variant": "seq_cls"}
_EXPERTS, _NORM, _GATED = {"op": "moe_experts"}, {"op": "rms_norm"}, {"op": "rms_norm_gated"}
_BALANCE, _LOW = {"op": "load_balancing_loss"}, {"dtype": "bfloat16"}
_TILES = {"largest": Size.BEYOND_A_TILE}
_ATTENTION, _CAPPED = {"op": "attention"}, ("softcap", "sinks")
_ROWS, _MODE = KernelOption("rows", 256, minimum=1), KernelOption("mode", "usual", choices=("usual", "fast"))
SMALL = [
    (skips_chunks_that_begin_masked, "'many tokens, most of them masked': the result", _LOSS),
    (labels_of_int32_are_cut, "'labels of int32': the result", _LOSS),
    (three_options_forget_the_softcap, "'every option at once, labels of int32': the result", _LOSS),
    (drops_the_one_word_of_a_tile, "'many tokens, most of them masked': the gradient of weight", _LOSS),
    (wrong_of_one_word, "'a vocabulary of one': the result", _LOSS),
    (gradient_a_little_small, "the gradient of weight is too small on average, by 3", _LOSS | _LOW),
    (a_hundred_ignored_classes, "'many ignored labels, in int32': the result", _CLASSES),
    (adds_to_a_parameters_grad, "it writes into the `.grad` of weight", _NORM),
    (keeps_a_parameter, "where its inputs were changed in place since its last call", _NORM),
    (keeps_what_inference_made, "after a first call under torch.inference_mode(), ", _NORM),
    (another_second_step, "where backward() runs in two steps, the result is off", _NORM),
    (the_one_row_of_a_tile, "'65 rows': the result", _NORM),
    (five_dimensions, "'5 dimensions': the result", _NORM),
    (four_contiguous_dimensions, "'4 dimensions': the result", _NORM),
    (a_row_further_in_a_batch_of_one, "'a batch of one, strided oddly': the result", _NORM),
    (wrong_width_of_one, "'a width of one': the result", _NORM),
    (gives_x_itself, "'a result equal to x': its result shares memory with its input x", _NORM),
    (adds_to_grad_beside_activations, "where its first input is another layer's result, and the others", _NORM),
    (eps_of_zero_is_a_default, "'without eps': the result", _NORM),
    (bias_is_added_after_the_scale, "'the first word is ignored, and scale': the result", _LOSS),
    (one_eps, "'odd rows': the result", _GATED),
    (groups_are_powers_of_two, "'groups of 48': the result", _GATED),
    (cuts_off_instead_of_rounding, "the result is too small on average", _LOW),
    (gives_gate_itself, "'a result equal to gate': its result shares memory with its input gate", {}),
    (gives_zeros_back_where_nothing_is_recorded, "under torch.no_grad(): its result shares memory", {}),
    (gives_an_empty_input_back, "'no rows': its result shares memory with its input up", {}),
    (mlp_of_five_dimensions, "'5 dimensions': the result", {}),
    (eight_choices, "'widths of 64, twelve choices': the result", _EXPERTS),
    (widths_of_64, "'widths of 64, twelve choices': the result", _EXPERTS),
    (the_65th_token_of_an_expert, "'one expert takes all': the result", _EXPERTS),
    (refuses_a_router_in_float32, "'a router in float32': raised ValueError", _EXPERTS | _LOW),
    (balances_eight_choices, "'twelve of 64 experts, a mask': the", _BALANCE),
    (with_mode, "with mode='fast'", {"options": (_MODE,)}),
    (with_mode_in_rows, "with mode='fast' and rows=1", {"options": (_MODE, _ROWS)}),
    (in_rows, "with rows=1", {"options": (_ROWS,)}),
    (in_many_rows, "with rows=512", {"options": (_ROWS,)}),
]
LARGER = [
    (nothing_is_learned_after_a_long_prompt, "'a long prompt': the result", _LOSS | _TILES),
    (counts_tokens_in_twelve_bits, "'4096 tokens, all learned': the result", _LOSS | _TILES),
    (aligned_columns_past_a_tile, "'16384 columns': the result", _NORM | _TILES),
    (wrong_under_compile, "under torch.compile, as sample", _NORM),
    (forgets_the_softcap_under_compile, "under torch.compile, as sample 'softcap and scale' shows", _LOSS),
    (divides_by_the_items_in_forward, "'a million items': the gradient", _LOSS | _TILES | {"dtype": "float16"}),
    (a_hundred_and_thirty_experts, "'193 experts, the last 43 empty': the result", _EXPERTS | _TILES),
    (gradients_of_empty_experts_at_the_end, "'193 experts, the last 43 empty': the gradient", _EXPERTS | _TILES),
    (aligned_widths_past_a_tile, "'aligned, past 128 tokens and columns': the result", _EXPERTS | _TILES),
    (eight_layers, "'33 layers': the result", _BALANCE | _TILES),
    (narrow_heads_beside_padding, "'mask padding", _ATTENTION | {"features": ("padding_mask",)} | _TILES),
    (groups_of_eight_beside_softcap_and_sinks, "('softcap', 'sinks')", _ATTENTION | {"features": _CAPPED} | _TILES),
    (square_projections_lie_transposed, "widths (48, 48)", _EXPERTS | _TILES),
    (other_ignored_labels_past_a_tile, "ignored 7", _LOSS | _TILES),
    (columns_that_fill_no_whole_tile, "'5120 columns': the result", _NORM | _TILES),
    (balances_without_empty_experts, "'300 experts, many of them empty': the result", _BALANCE | _TILES),
]


@pytest.fixture(autouse=True)
def _nothing_kept():
    _kept.clear()


@pytest.mark.parametrize("kernel, words, options", SMALL, ids=[fault[0].__name__ for fault in SMALL])
def test_a_fault_of_one_kind_is_caught_by_a_small_sample(kernel, words, options):
    assert_caught(kernel, words, **options)


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("kernel, words, options", LARGER, ids=[fault[0].__name__ for fault in LARGER])
def test_a_fault_of_one_kind_is_caught_by_a_larger_one(kernel, words, options):
    assert_caught(kernel, words, **options)


def _offsets_of_32_bits(gate, up):
    result = right(gate, up)
    return torch.cat((result[:-1], result[-1:] * 1.01)) if result.numel() > 2**14 else result


def test_offsets_past_32_bits_are_asked_where_there_is_memory(monkeypatch):
    monkeypatch.setattr(huge_calls, "ELEMENTS", 2**14)
    contract = swiglu_mlp.CONTRACTS["standard"]

    def asked(kernel):
        spec = KernelSpec("k", "swiglu_mlp", "standard", "nowhere:kernel")
        subject = Subject(spec, kernel, contract, torch.device("cpu"), torch.bfloat16)
        return huge_calls.check_huge_calls(subject, subject.positions(Size.SMALL))

    assert asked(right).sample == "past 2^31 elements (left out: not enough memory)"
    monkeypatch.setattr(huge_calls, "_free", lambda subject: 2**40)
    assert asked(right) == CaseResult("past 2^31 elements", ())
    (failure,) = asked(_offsets_of_32_bits).failures
    assert failure.startswith("where offsets are past 2^31 elements, the result is off")


def chosen(x):
    values, indices = x.topk(3, dim=-1)
    return values, indices


def chosen_wrongly(x):
    values, indices = chosen(x)
    return values, torch.cat((indices[:, :2], (indices[:, 2:] + 1) % x.shape[1]), dim=1)


def _choices(device, dtype):
    draw = Draw(device, dtype)
    yield Sample("three of seven", (leaf(draw.normal(5, 7)),))


_EXACT = {"float32": Tolerance(1e-6, 1e-6)}
CHOICES = {"standard": Contract("choose", "standard", chosen, _choices, values=_EXACT, gradients=_EXACT)}


def test_results_that_are_integers_are_compared_exactly():
    op = OpSpec(
        name="choose", variants=("standard",), config_field="choose_implementation", contract=f"{__name__}:CHOICES"
    )

    def failures(kernel):
        return check_kernel(KernelSpec("k", "choose", "standard", f"{__name__}:{kernel}"), op=op).failures

    assert failures("chosen") == ()
    assert any("result 1 is another integer in 5 places" in each for each in failures("chosen_wrongly"))


def wrong_on_other_values(x, weight, eps):
    first = _kept.setdefault((x.shape, x.stride()), x.detach().flatten()[:1].clone())
    other = x.numel() > 0 and not torch.equal(x.detach().flatten()[:1], first)
    return rms_norm.standard(x, weight, eps) * (1.01 if other else 1.0)


def wrong_of_coarse_values(x, weight, eps):
    coarse = x.numel() > 0 and torch.equal(x.bfloat16().float(), x)
    return rms_norm.standard(x, weight, eps) * (1.01 if coarse else 1.0)


def wrong_of_equal_rows(x, weight, eps):
    equal = x.dim() > 1 and len(x) > 1 and torch.equal(x[:1].expand_as(x), x)
    return rms_norm.standard(x, weight, eps) * (1.01 if equal else 1.0)


def barely_wrong(x, weight, eps):
    return rms_norm.standard(x, weight, eps) * (1 + 1.2e-6)


def test_a_situation_is_not_blamed_for_what_fails_without_it_too():
    stale = failures_of(wrong_on_other_values, op="rms_norm")
    assert any("and not only there: on other values of the same shapes, the result is off" in each for each in stale)
    low = [each for each in failures_of(wrong_of_coarse_values, op="rms_norm") if "autocast" in each]
    assert low and all("on values that bfloat16 holds, without autocast, the result is off" in each for each in low)
    rows = [
        each
        for each in failures_of(wrong_of_equal_rows, op="rms_norm")
        if "equal rows" in each or "stride of zero" in each
    ]
    assert rows and all("with inputs of equal rows, the result is off" in each for each in rows)


def test_a_failure_names_shapes_and_options_and_a_near_one_says_so():
    (first, *_) = failures_of(barely_wrong, op="rms_norm", fail_fast=True)
    assert "norm error 1.2e-06, allowed 1.0e-06, near the limit" in first
    assert first.endswith("[x (3, 5, 97), weight (97,), eps=1e-06]")
    (first, *_) = failures_of(labels_of_int32_are_cut, fail_fast=True, **_LOSS)
    assert "weight (64, 32), labels [-100, -100, -100, " in first and first.endswith("] int32]")
    cases = (CaseResult("odd width", (), 0.9, 0.1), CaseResult("wide", (), 0.2))
    assert ConformanceReport("k", "cpu", "float32", cases).near == ("sample 'odd width' is at 90% of its tolerance",)


def test_a_failure_that_samples_share_is_said_once():
    names, said = ("odd width", "one row", "wide", "long"), "raised TypeError: no eps"
    cases = [CaseResult(name, (said,), call="x (3, 97)") for name in names]
    report = ConformanceReport("k", "cpu", "float32", (*cases, CaseResult("zeros", ("is off",))))
    assert report.failures == (
        f"sample 'odd width': {said} [x (3, 97)], and 3 more samples alike",
        "sample 'zeros': is off",
    )
