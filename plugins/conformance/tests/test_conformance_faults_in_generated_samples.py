"""Faults that only a generated call shows, and what a generated call may not ask."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch
from planted_faults import failures_of, right

from veomni_conformance import check_kernel
from veomni_conformance.generated_samples import MISSING
from veomni_conformance.sample_changes import MEMORY, VALUES, SampleChange
from veomni_conformance.subject import Position, Subject
from veomni_core import KernelSpec
from veomni_ops import chunk_gated_delta_rule, kda, load_balancing_loss, rms_norm
from veomni_ops.contract import Size


def wrong_at_33_rows(gate, up):
    return right(gate, up) * (1.01 if gate.dim() > 1 and gate.shape[0] == 33 else 1.0)


def wrong_where_equal_values_meet_a_frozen_input(gate, up):
    equal = gate.numel() > 1 and bool((up == up.reshape(-1)[:1].detach().view([1] * up.dim())).all())
    return right(gate, up) * (1.01 if equal and not gate.requires_grad else 1.0)


def flushes_denormal_numbers(gate, up):
    denormal = (gate.abs() < torch.finfo(gate.dtype).tiny) & (gate != 0)
    return right(gate.masked_fill(denormal, 0.0), up)


def wrong_where_rows_overlap(gate, up):
    overlap = gate.dim() > 1 and gate.stride(-1) == 1 and 0 < gate.stride(-2) < gate.shape[-1]
    return right(gate, up) * (0.5 if overlap else 1.0)


def wrong_where_inputs_overlap(gate, up):
    apart = abs(gate.data_ptr() - up.data_ptr())
    return right(gate, up) * (0.5 if 0 < apart < gate.element_size() * gate.shape[-1] else 1.0)


def nan_for_a_logit_of_minus_infinity(gate_logits, *args):
    masked = any(logits.isneginf().any() for logits in gate_logits)
    return load_balancing_loss.standard(gate_logits, *args) * (float("nan") if masked else 1.0)


def overflows_where_rows_are_large(x, weight, eps):
    overflows = (x.detach().abs() > 1e3) & x.isfinite()
    return rms_norm.standard(x, weight, eps).masked_fill(overflows, 0.0)


_NORM, _BALANCE = {"op": "rms_norm"}, {"op": "load_balancing_loss"}
FAULTS = [
    (wrong_at_33_rows, "33 rows", {}),
    (wrong_where_equal_values_meet_a_frozen_input, "frozen yes", {}),
    (flushes_denormal_numbers, "values denormal", {}),
    (wrong_where_rows_overlap, "memory overlapping", {}),
    (wrong_where_inputs_overlap, "inputs over each other in memory", {}),
    (nan_for_a_logit_of_minus_infinity, "values infinite", _BALANCE),
    (overflows_where_rows_are_large, "values large", _NORM),
]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("kernel, words, options", FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_fault_that_only_a_generated_call_shows_is_caught_and_named(kernel, words, options):
    (failure,) = failures_of(kernel, **options)
    assert failure.startswith("sample 'generated samples': made from")
    assert words in failure


def as_spec(contract):
    return KernelSpec("reference", contract.op_name, contract.variant, f"veomni_ops.{contract.op_name}:standard")


def test_the_same_calls_are_generated_every_time():
    assert failures_of(wrong_at_33_rows) == failures_of(wrong_at_33_rows)


def test_changes_that_must_meet_are_found_and_reported_in_their_simplest_form():
    (failure,) = failures_of(wrong_where_equal_values_meet_a_frozen_input)
    assert "(values equal, frozen yes)" in failure


def test_no_generated_sample_leaves_the_ranges_of_its_contract():
    """A kernel of the delta rule is right for decays and for corrections that add up, and is asked nothing else."""
    for op in (chunk_gated_delta_rule, kda):
        contract = op.CONTRACTS["standard"]
        subject = Subject(as_spec(contract), contract.reference, contract, torch.device("cpu"), torch.float32)
        changes = [SampleChange(values=VALUES[index:], shared=True, memory=MEMORY[index:]) for index in range(6)]
        for position, change in itertools.product(subject.positions(Size.SMALL), changes):
            inputs = subject.inputs(change.applied(subject, subject.sample(position)))
            assert (inputs["g"] <= 0).all() and (inputs["beta"] >= 0).all(), change


def test_only_inputs_of_one_range_lie_over_each_other():
    contract = chunk_gated_delta_rule.CONTRACTS["standard"]
    subject = Subject(as_spec(contract), contract.reference, contract, torch.device("cpu"), torch.float32)
    inputs = subject.inputs(SampleChange(shared=True).applied(subject, subject.sample(Position(Size.SMALL, 1))))
    places = {name: inputs[name].untyped_storage().data_ptr() for name in ("query", "key", "value", "g", "beta")}
    assert places["query"] == places["key"] == places["value"]
    assert len({places[name] for name in ("query", "g", "beta")}) == 3


def test_without_hypothesis_the_report_says_what_was_not_asked(monkeypatch):
    find = importlib.util.find_spec
    absent = {"hypothesis"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    spec = KernelSpec("right", "swiglu_mlp", "standard", "planted_faults:right")
    report = check_kernel(spec, largest=Size.SMALL)
    assert report.ok
    assert MISSING in report.skipped
    assert not any("frozen" in failure for failure in failures_of(wrong_where_equal_values_meet_a_frozen_input))
