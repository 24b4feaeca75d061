"""Faults between two threads, in custom operators, and in what a spec promises: batch invariance and full graphs."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from planted_faults import assert_caught, derivatives, failures_of, right
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.library import custom_op

from veomni_conformance.batch_invariance import check_batch_invariance
from veomni_conformance.custom_operators import _Recorder
from veomni_conformance.subject import Position, Subject
from veomni_conformance.time_spent import TimeSpent
from veomni_core import KernelSpec
from veomni_ops import attention, causal_conv1d, cross_entropy_loss, swiglu_mlp
from veomni_ops.catalog import OPS
from veomni_ops.contract import Size, contract_for

_kept: dict[str, Tensor] = {}
_lock = threading.Lock()
_busy = threading.Event()


def keeps_its_operand_in_a_global(gate, up):
    _kept["gate"] = gate
    result = right(_kept["gate"], up)
    _kept.clear()
    return result


def computes_in_a_shared_workspace(gate, up):
    if torch.is_inference_mode_enabled():
        return right(gate, up)
    workspace = _kept.setdefault(f"{gate.shape} {gate.dtype}", torch.empty_like(gate.detach()))
    workspace.copy_(gate.detach())
    value = torch.nn.functional.silu(workspace) * up.detach()
    result = right(gate, up)
    return result + (value - result).detach()


def raises_where_it_is_busy(gate, up):
    if _busy.is_set():
        raise RuntimeError("one call at a time")
    _busy.set()
    result = right(gate, up)
    _busy.clear()
    return result


def waits_for_the_other_thread(gate, up):
    """Right: a lock guards what it keeps."""
    with _lock:
        _kept["gate"] = gate
        result = right(_kept["gate"], up)
        _kept.clear()
    return result


@pytest.mark.parametrize(
    "kernel, words",
    [
        (keeps_its_operand_in_a_global, "called from two threads at the same time, "),
        (computes_in_a_shared_workspace, "called from two threads at the same time, the result is off"),
        (raises_where_it_is_busy, "called from two threads at the same time, it raises RuntimeError: one call"),
    ],
)
def test_a_fault_between_two_threads_is_caught_and_named_every_time(kernel, words):
    for _ in range(3):
        _busy.clear()
        _kept.clear()
        assert any(words in failure for failure in failures_of(kernel))


def test_a_kernel_with_a_lock_of_its_own_passes():
    assert failures_of(waits_for_the_other_thread) == ()


def rounds_by_the_size_of_its_batch(gate, up):
    return swiglu_mlp.standard(gate, up) * (1.0 + 2.0**-23 * (gate.shape[0] % 2 if gate.dim() > 1 else 0))


def starts_with_another_row(gate, up):
    odd = torch.arange(gate.shape[0], dtype=gate.dtype).view(-1, *[1] * (gate.dim() - 1)) % 2
    shift = 2.0**-23 * odd
    return swiglu_mlp.standard(gate, up) * (1.0 + shift)


def loss_of_a_batch(*args, **options):
    return cross_entropy_loss.seq_cls(*args, **options)


def plain(gate, up):
    return swiglu_mlp.standard(gate, up)


@pytest.mark.parametrize(
    "kernel, words",
    [(rounds_by_the_size_of_its_batch, "where row 0 is alone"), (starts_with_another_row, "where row 1 is alone")],
)
def test_a_batch_that_changes_the_bits_of_a_row_is_caught_where_invariance_is_promised(kernel, words):
    assert_caught(kernel, f"{words}, promises batch invariance, but rows have other bits", batch_invariant=True)
    assert failures_of(kernel) == ()


def test_a_promise_that_the_contract_cannot_check_is_a_failure():
    words = "promises batch invariance, which its op's contract cannot check"
    assert_caught(loss_of_a_batch, words, op="cross_entropy_loss", variant="seq_cls", batch_invariant=True)


def splits_its_sums_by_the_batch(x, weight, bias=None):
    half = x.shape[-1] // 2 if len(x) > 2 else 0
    first = x[..., :half] @ weight[:, :half].t()
    return torch.nn.functional.linear(x[..., half:], weight[:, half:], bias) + first


def adds_in_an_order_of_its_own(x, weight, bias=None):
    """As atomic additions do."""
    order = torch.randperm(x.shape[-1])
    parts = (x[..., order, None] * weight.t()[order]).unbind(-2)
    total = functools.reduce(torch.add, parts)
    return total if bias is None else total + bias


def counts_positions_of_the_row(x, weight, bias=None, activation=None, seq_idx=None):
    wide = (None if each is None else each.double() for each in (x, weight, bias))
    result = causal_conv1d.standard(*wide, activation, seq_idx).to(x.dtype)
    return result * (1.0 + 2.0**-23 * (x.shape[-1] % 2))


def blocks_by_the_number_of_queries(module, query, key, value, attention_mask, **options):
    wide = (each.double() for each in (query, key, value))
    output = attention.standard(module, *wide, attention_mask, **options)[0].to(query.dtype)
    return output * (1.0 + 2.0**-23 * (query.shape[2] % 2)), None


def mean_of_all_tokens(hidden, weight, labels, *args, **options):
    loss = cross_entropy_loss.causal(hidden.double(), weight.double(), labels, *args, **options).float()
    return loss * (1.0 + 2.0**-23 * (len(labels) > 1))


@pytest.mark.parametrize(
    "kernel, op, variant, words",
    [
        (splits_its_sums_by_the_batch, "linear", "standard", "where row 0 is alone"),
        (adds_in_an_order_of_its_own, "linear", "standard", "is alone, promises batch invariance"),
        (counts_positions_of_the_row, "causal_conv1d", "standard", "where later positions are cut off"),
        (blocks_by_the_number_of_queries, "attention", "standard", "where it is padded on the left"),
        (mean_of_all_tokens, "cross_entropy_loss", "causal", "where token 5 is alone"),
    ],
)
def test_what_a_layout_changes_is_caught_where_invariance_is_promised(kernel, op, variant, words):
    features = ("any_width", "sinks", "softcap", "sliding_window", "packed", "dense_mask", "softcap_by_lengths")
    position = Position(Size.SMALL, 0)
    spec = KernelSpec(kernel.__name__, op, variant, kernel, features=features, batch_invariant=True)
    contract = contract_for(next(each for each in OPS if each.name == op), variant)
    subject = Subject(spec, kernel, contract, torch.device("cpu"), torch.float32, TimeSpent())
    assert any(words in sentence for sentence in check_batch_invariance(subject, position))


def reads_a_value(gate, up):
    all_zero = not gate.detach().any().item()
    return gate * up if all_zero else swiglu_mlp.standard(gate, up)


def branches_on_the_number_of_rows(gate, up):
    return swiglu_mlp.standard(gate, up) * (1.0 if gate.shape[0] != 7 else torch.ones_like(gate))


@pytest.mark.parametrize(
    "kernel, words",
    [
        (reads_a_value, "where torch.compile captures it whole, it raises "),
        (branches_on_the_number_of_rows, "where torch.compile captures it whole, it is compiled"),
    ],
)
def test_what_breaks_a_graph_is_caught_where_full_graphs_are_promised(kernel, words):
    assert_caught(kernel, words, fullgraph=True)


def test_a_kernel_that_keeps_both_promises_passes():
    assert failures_of(plain, fullgraph=True, batch_invariant=True) == ()


def _operator(name, body, fake):
    operator = custom_op(f"planted_faults::{name}", body, mutates_args=())
    operator.register_fake(fake)
    operator.register_autograd(_backward, setup_context=_save)
    return operator


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, upstream):
    gate, up = ctx.saved_tensors
    dgate, dup = derivatives(gate, up, upstream)
    return dgate.to(gate.dtype), dup.to(up.dtype)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


_right_operator = _operator("right", _product, lambda gate, up: torch.empty_like(gate))
_wide_operator = _operator("wide", _product, lambda gate, up: gate.new_empty((*gate.shape, 1)))
_double_operator = _operator("double", _product, lambda gate, up: torch.empty_like(gate, dtype=torch.float64))


def a_right_operator(gate, up):
    return _right_operator(gate.contiguous(), up.contiguous())


def an_operator_with_a_fake_of_another_shape(gate, up):
    return _wide_operator(gate.contiguous(), up.contiguous())


def an_operator_with_a_fake_of_another_dtype(gate, up):
    return _double_operator(gate.contiguous(), up.contiguous())


def _compiled(function):
    compiled = torch.compile(function, fullgraph=True, backend="eager")

    @functools.wraps(function)
    def call(gate, up):
        with dynamo_config.patch(recompile_limit=256):
            return compiled(gate, up)

    return call


@_compiled
def compiled_by_its_author(gate, up):
    return _right_operator(gate.contiguous(), up.contiguous())


@_compiled
def compiled_with_a_fake_of_another_dtype(gate, up):
    return _double_operator(gate.contiguous(), up.contiguous())


WRONG_FAKES = (
    an_operator_with_a_fake_of_another_shape,
    an_operator_with_a_fake_of_another_dtype,
    compiled_with_a_fake_of_another_dtype,
)


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", WRONG_FAKES)
def test_an_operator_whose_fake_implementation_is_wrong_is_caught_and_named(kernel):
    failures = [failure for failure in failures_of(kernel) if failure.startswith("sample 'custom operators'")]
    assert len(failures) == 1 and "its operator planted_faults::" in failures[0] and "test_faketensor" in failures[0]


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", [a_right_operator, compiled_by_its_author])
def test_a_right_operator_passes(kernel):
    assert not [failure for failure in failures_of(kernel) if "second derivatives" not in failure]


def test_an_operator_that_takes_functions_runs_where_operators_are_recorded():
    """A compiled graph keeps ``torch.cond`` and FlexAttention as operators of that kind."""
    branch = torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend="eager")
    with _Recorder():
        torch.testing.assert_close(branch(torch.ones(3)), torch.ones(3).sin())
