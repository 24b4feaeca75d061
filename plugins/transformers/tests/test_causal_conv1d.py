"""causal_conv1d: its contract against transformers' function, packed calls, and the faults that it catches."""

from __future__ import annotations

import pytest
import torch
from planted_faults import assert_caught, failures_of
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.qwen3_next import modeling_qwen3_next

from veomni_ops.causal_conv1d import numbered, standard
from veomni_transformers.packed.convolution_call import for_packed_calls, for_single_tokens, sequence_numbers


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("bias", [None, torch.randn(6)], ids=["no bias", "bias"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 11])
def test_the_reference_is_transformers_function(width, length, bias, activation):
    x, weight = torch.randn(2, 6, length, requires_grad=True), torch.randn(6, width, requires_grad=True)
    found = standard(x, weight, bias, activation)
    wanted = modeling_qwen3_next.causal_conv1d_fn(x, weight, bias, activation=activation)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(*(torch.autograd.grad(y, (x, weight), upstream) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 6], [6, 1], [1, 1, 5], [3, 1, 3], [1] * 7, [7]])
def test_the_reference_of_a_packed_row_is_that_of_each_sequence_alone(lengths):
    x, weight = torch.randn(1, 4, 7), torch.randn(4, 4)
    alone = [standard(part, weight) for part in x.split(lengths, dim=2)]
    torch.testing.assert_close(
        standard(x, weight, seq_idx=numbered(lengths, x.device)), torch.cat(alone, dim=2), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "change, words",
    [
        ({"activation": "gelu"}, "'gelu'"),
        ({"bias": torch.zeros(5)}, "one number for each of 4 channels"),
        ({"seq_idx": torch.zeros(2, 6, dtype=torch.int32)}, "one for each position of x"),
        ({"seq_idx": torch.zeros(2, 7)}, "give integers"),
        ({"weight": torch.zeros(5, 3)}, "give x"),
        ({"weight": torch.zeros(4, 1, 3)}, "give x"),
    ],
)
def test_a_call_that_no_kernel_computes_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        standard(**{"x": torch.zeros(2, 4, 7), "weight": torch.zeros(4, 3), **change})


def test_sequences_are_numbered_from_their_boundaries():
    x = torch.zeros(1, 3, 6)
    for boundaries, wanted in (([0, 6], [0] * 6), ([0, 1, 6], [0, 1, 1, 1, 1, 1]), ([0, 2, 2, 6], [0, 0, 2, 2, 2, 2])):
        assert sequence_numbers(torch.tensor(boundaries), x).tolist() == [wanted]
    with pytest.raises(ValueError, match="the batch has 2"):
        sequence_numbers(torch.tensor([0, 6]), x.expand(2, -1, -1))


def test_seq_idx_is_taken_before_the_boundaries():
    seen = []
    call = for_packed_calls(lambda *args, **kwargs: seen.append(kwargs["seq_idx"]))
    x, weight, numbers = torch.zeros(1, 3, 6), torch.zeros(3, 2), torch.arange(6)[None]
    call(x, weight, None, activation=None, seq_idx=numbers, cu_seq_lens_q=torch.tensor([0, 6]), max_length_q=6)
    call(x, weight)
    assert seen[0] is numbers and seen[1] is None


def test_hooks_of_all_modules_have_the_models_function_run_unless_there_are_boundaries():
    """Packed, that function mixes sequences or raises; the receipt names the site either way."""
    seen = []
    kernel, own = (lambda *_, name=name, **__: seen.append(name) for name in ("kernel", "own"))
    call, step = for_packed_calls(kernel, own), for_single_tokens(lambda x, *_, **__: kernel() or x, own)
    x, weight = torch.zeros(1, 3, 6), torch.zeros(3, 2)
    handle = register_module_forward_hook(lambda module, inputs, output: None)
    try:
        call(x, weight, None, activation="silu", max_length_q=6)
        call(x, weight, None, activation="silu", cu_seq_lens_q=torch.tensor([0, 6]))
        call(x, weight, None, activation="silu", seq_idx=torch.zeros(1, 6))
        step(x[..., :1], x[..., :2], weight)
    finally:
        handle.remove()
    call(x, weight, None, activation="silu")
    step(x[..., :1], x[..., :2], weight)
    assert seen == ["own", "kernel", "kernel", "own", "kernel", "kernel"]


# Planted faults.


def leaks_over_a_boundary(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, weight, bias, activation)


def leaks_the_first_of_two_neighbours(x, weight, bias=None, activation=None, seq_idx=None):
    """As one that compares with the number of the next position, and not with that of each earlier one."""
    if seq_idx is not None:
        seq_idx = torch.cat([seq_idx[:, 1:], seq_idx[:, -1:]], dim=1)
    return standard(x, weight, bias, activation, seq_idx)


def ignores_the_bias(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, weight, None if bias is None else 0 * bias, activation, seq_idx)


def ignores_the_activation(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, weight, bias, None, seq_idx)


def looks_ahead(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x.flip(2), weight, bias, activation, None if seq_idx is None else seq_idx.flip(1)).flip(2)


class _LosesOfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, upstream):
        share = torch.ones_like(upstream)
        share[:, 0] = 0.99
        return upstream * share


def has_a_gradient_that_is_off(x, weight, bias=None, activation=None, seq_idx=None):
    return standard(x, _LosesOfTheGradient.apply(weight), bias, activation, seq_idx)


class _LeaksInBackward(torch.autograd.Function):
    """Right in forward; its gradient of ``x`` is that of a row that isn't packed."""

    @staticmethod
    def forward(ctx, x, weight, bias, activation, seq_idx):
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.activation = activation
        return standard(x, weight, bias, activation, seq_idx)

    @staticmethod
    def backward(ctx, upstream):
        x, weight, bias, seq_idx = ctx.saved_tensors
        given = [each.detach().requires_grad_() for each in (x, weight, bias) if each is not None]
        with torch.enable_grad():
            packed, whole = (standard(*(*given, None)[:3], ctx.activation, index) for index in (seq_idx, None))
        dx, *others = torch.autograd.grad(packed, given, upstream, retain_graph=True)
        if seq_idx is not None:
            (dx,) = torch.autograd.grad(whole, given[:1], upstream)
        return dx, *others, *([None] * (4 - len(others)))


def leaks_in_backward(x, weight, bias=None, activation=None, seq_idx=None):
    return _LeaksInBackward.apply(x, weight, bias, activation, seq_idx)


FAULTS = [
    (leaks_over_a_boundary, "'packed': the result is off"),
    (leaks_the_first_of_two_neighbours, "'packed': the result is off"),
    (ignores_the_bias, "'a bias, no activation': the result is off"),
    (ignores_the_activation, "'odd length': the result is off"),
    (looks_ahead, "'odd length': the result is off"),
    (has_a_gradient_that_is_off, "'odd length': the gradient of weight is off"),
    (leaks_in_backward, "'packed': the gradient of x is off"),
]


@pytest.mark.parametrize(("kernel", "words"), FAULTS, ids=[kernel.__name__ for kernel, _ in FAULTS])
def test_the_contract_catches(kernel, words):
    assert_caught(kernel, words, op="causal_conv1d", features=("any_width",))


def takes_widths_of_the_package(x, weight, bias=None, activation=None, seq_idx=None):
    if not 2 <= weight.shape[1] <= 4:
        raise ValueError(f"the width is {weight.shape[1]}, not 2 to 4")
    return standard(x, weight, bias, activation, seq_idx)


def test_a_kernel_of_few_widths_passes_without_the_feature():
    assert failures_of(takes_widths_of_the_package, op="causal_conv1d") == ()
    assert any(
        "'seven positions'" in each
        for each in failures_of(takes_widths_of_the_package, op="causal_conv1d", features=("any_width",))
    )
