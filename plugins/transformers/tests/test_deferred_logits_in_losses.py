"""Of deferred logits a plain cross entropy is the kernel's; any other loss is computed from the logits."""

from __future__ import annotations

import pytest
import torch
from deferred_head import VOCABULARY, Head, assert_like_eager, backward
from fused_head import LOSS_ALONE, REGISTRY
from torch.nn import functional as F

from models import build, tokens
from veomni_core import bind
from veomni_transformers.forwards.head_call import HeadCall


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}], ids=str)
def test_a_plain_cross_entropy_is_the_kernel_s(options):
    assert_like_eager(lambda head: backward(head.loss(**options)))
    head = Head(True)
    head.loss(**options)
    assert len(head.asked) == 1 and head.logits.computed is None


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"weight": torch.rand(VOCABULARY)}],
    ids=["label smoothing", "class weights"],
)
def test_another_cross_entropy_is_computed_from_the_logits(options):
    assert_like_eager(lambda head: backward(head.loss(**options)))
    head = Head(True)
    head.loss(**options)
    assert not head.asked


def test_a_loss_per_token_is_computed_from_the_logits():
    assert_like_eager(lambda head: backward(head.loss(reduction="none").mean()))


@pytest.mark.parametrize(
    "between, softcap, scale",
    [
        (lambda x: x * 3.0, None, 3.0),
        (lambda x: x / 4.0, None, 0.25),
        (lambda x: torch.tanh(x / 5.0) * 5.0, 5.0, 1.0),
        (lambda x: 2.0 * torch.tanh(x), 2.0, 2.0),
    ],
    ids=["a scale", "a temperature", "a softcap", "a softcap of the scaled"],
)
def test_a_scale_and_a_softcap_are_told_to_the_kernel(between, softcap, scale):
    assert_like_eager(lambda head: backward(head.loss(between)))
    head = Head(True)
    head.loss(between)
    (asked,) = head.asked
    assert (asked["softcap"], asked["scale"] or 1.0) == (softcap, pytest.approx(scale))


def test_the_backward_of_a_softcap_computes_no_logits(monkeypatch):
    model = build("gemma2", final_logit_softcapping=2.0)
    bind(model, LOSS_ALONE, registry=REGISTRY)
    monkeypatch.setattr(HeadCall, "compute_logits", lambda call: pytest.fail("all logits were computed"))
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad.any()


@pytest.mark.parametrize(
    "between",
    [
        torch.tanh,
        lambda x: torch.tanh(x) * 2.0 * 3.0,
        lambda x: torch.tanh(x) / 2.0,
        lambda x: x + 1.0,
        lambda x: -x,
        lambda x: (x * 1.0).mul_(2.0),
    ],
    ids=["tanh alone", "a scaled softcap", "a softcap below", "a sum", "the negative", "in place"],
)
def test_other_arithmetic_computes_the_logits(between):
    assert_like_eager(lambda head: backward(head.loss(between)))


@pytest.mark.parametrize("labels", [7, 13])
def test_labels_of_another_length_are_refused_as_in_eager_code(labels):
    head = Head(True)
    with pytest.raises(ValueError, match=r"Expected input batch_size \(10\) to match target batch_size"):
        F.cross_entropy(head.logits.view(-1, VOCABULARY), torch.zeros(labels, dtype=torch.long))


def test_two_fused_losses_add_up_without_logits():
    def run(head: Head) -> torch.Tensor:
        return backward(head.loss() + 2.0 * head.loss(reduction="sum"))

    assert_like_eager(run)
    head = Head(True)
    run(head)
    assert len(head.asked) == 2 and head.logits.computed is None
