"""Attention kernels that declare dropout and compute it wrongly."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from veomni_conformance.dropped_weights import check_dropped_weights
from veomni_conformance.subject import Subject
from veomni_core import KernelSpec
from veomni_ops.attention import CONTRACTS
from veomni_torch.attention import sdpa

RATE = 0.25


class Dropped(torch.autograd.Function):
    """``weights`` where ``kept``, and in backward where ``kept_in_backward``."""

    @staticmethod
    def forward(ctx, weights, kept, kept_in_backward):
        ctx.save_for_backward(kept_in_backward)
        return weights * kept

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


def attention(module, query, key, value, mask, dropout=0.0, *, fault="", **options):
    if not dropout:
        return sdpa(module, query, key, value, mask, **options)
    if fault == "one seed":
        torch.manual_seed(0)
    key, value = (each.repeat_interleave(module.num_key_value_groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if module.is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    weights = scores.softmax(-1)
    rate = 1 - dropout if fault == "drops what it should keep" else dropout
    shape = (len(weights), 1, *weights.shape[2:]) if fault == "one mask for all heads" else weights.shape
    generator = torch.Generator().manual_seed(attention.calls) if fault == "a generator of its own" else None
    attention.calls += 1
    kept = torch.rand(shape, generator=generator) >= rate
    scale = 1.0 if fault == "does not scale" else 1 / (1 - rate)
    again = torch.rand(weights.shape) >= rate if fault == "draws again in backward" else kept
    unscaled = 1.0 if fault == "scales in forward alone" else scale
    return (Dropped.apply(weights, kept * scale, again * unscaled) @ value).transpose(1, 2), None


attention.calls = 0
FAULTS = {
    "does not scale": "with dropout, the result is off: element error",
    "scales in forward alone": "with dropout, the gradient of query is off",
    "draws again in backward": "with dropout, the gradient of query is off",
    "drops what it should keep": "with dropout, it drops 7",
    "one mask for all heads": "with dropout, it drops the same weights in two heads",
    "one seed": "with dropout, it drops the same weights in each call",
    "a generator of its own": "with dropout, with one seed it drops other weights",
    "ignores it": "with dropout, it drops 0.0% of the weights",
}


def subject(kernel) -> Subject:
    spec = KernelSpec("mine", "attention", "standard", factory="mine:attention", features=("dropout",))
    return Subject(spec, kernel, CONTRACTS["standard"], torch.device("cpu"), torch.float32)


def test_right_dropout_passes():
    assert not list(check_dropped_weights(subject(attention)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    kernel = partial(attention, fault=fault)
    if fault == "ignores it":
        kernel = lambda *args, dropout, **options: attention(*args, **options)  # noqa: E731
    found = list(check_dropped_weights(subject(kernel)))
    assert found and found[0].startswith(FAULTS[fault])
