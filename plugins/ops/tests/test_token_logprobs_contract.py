"""Faults that kernels for ``token_logprobs`` have had elsewhere, each caught by the contract."""

from __future__ import annotations

import pytest
import torch
from planted_faults import assert_caught

from veomni_ops.token_logprobs import ENTROPY, LOGPROBS, causal


def entropy_of_unscaled_logits(hidden, weight, labels, temperature=1.0, outputs=(LOGPROBS,), **options):
    found = dict(
        zip(outputs, causal(hidden, weight, labels, temperature=temperature, outputs=outputs, **options), strict=True)
    )
    if ENTROPY in found:
        found[ENTROPY] = causal(hidden, weight, labels, outputs=(ENTROPY,), **options)[0]
    return tuple(found[name] for name in outputs)


class _OfTemperature(torch.autograd.Function):
    """Divides by the temperature, and forgets it in backward."""

    @staticmethod
    def forward(ctx, hidden, temperature):
        return hidden / temperature

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def no_temperature_in_the_gradient(hidden, weight, labels, bias=None, temperature=1.0, **options):
    if bias is not None or isinstance(temperature, torch.Tensor) or options.get("softcap") is not None:
        return causal(hidden, weight, labels, bias=bias, temperature=temperature, **options)
    return causal(_OfTemperature.apply(hidden, temperature), weight, labels, **options)


def counts_ignored_rows(hidden, weight, labels, ignore_index=-100, **options):
    return causal(hidden, weight, torch.where(labels == ignore_index, 0, labels), ignore_index=-1, **options)


def scores_the_next_row(hidden, weight, labels, **options):
    return causal(hidden, weight, labels.roll(1), **options)


FAULTS = [
    (entropy_of_unscaled_logits, "'a low temperature': result 1 is off"),
    (no_temperature_in_the_gradient, "'a low temperature': the gradient of hidden is off"),
    (counts_ignored_rows, "'odd sizes': the result is off"),
    (scores_the_next_row, "'odd sizes': the result is off"),
]


@pytest.mark.parametrize(("kernel", "words"), FAULTS, ids=[kernel.__name__ for kernel, _ in FAULTS])
def test_the_contract_catches(kernel, words):
    assert_caught(kernel, words, op="token_logprobs", variant="causal")
