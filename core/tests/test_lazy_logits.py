"""Logits that are computed when something looks: what is read from them, and what reaches the loss instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from veomni_core.ops import cross_entropy_loss
from veomni_core.sites.lazy_logits import DEFER, LazyLogits, LogitsRequest, LossRequest

ALL = slice(None)


class DeferringHead(nn.Linear):
    """An output projection in the forward of a bound model; ``asked`` holds the losses that were asked of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 11)
        self.asked: list[LossRequest] = []
        setattr(self, DEFER, True)

    def forward(self, input):
        if isinstance(input, LogitsRequest):
            return super().forward(input.hidden)
        if isinstance(input, LossRequest):
            self.asked.append(input)
            options = {"ignore_index": input.ignore_index, "softcap": input.softcap, "scale": input.scale}
            return cross_entropy_loss.causal(
                input.hidden, self.weight, input.labels, self.bias, num_items_in_batch=input.items, **options
            )
        return LazyLogits(input, self)


@pytest.fixture
def head():
    return DeferringHead()


def lazy_and_real(head, *shape):
    hidden = torch.randn(*shape, 8)
    return head(hidden), nn.Linear.forward(head, hidden)


@pytest.mark.parametrize(
    "index, waits",
    [
        (0, True),
        (..., True),
        ((ALL, slice(-1)), True),
        ((ALL, -1), True),
        ((..., ALL), True),
        ((ALL, slice(1, None), ALL), True),
        ((..., 3), False),
        ((..., slice(5)), False),
        ((0, 1, 2), False),
        ((ALL, ALL, [1, 4]), False),
        (None, False),
        (torch.tensor([True, False]), False),
    ],
    ids=str,
)
def test_an_index_waits_where_it_leaves_the_vocabulary_whole(head, index, waits):
    lazy, real = lazy_and_real(head, 2, 5)
    found = lazy[index]
    assert isinstance(found, LazyLogits) == waits
    torch.testing.assert_close(found.materialize() if waits else found, real[index])


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}], ids=str)
def test_a_plain_cross_entropy_is_asked_of_the_head(head, options):
    lazy, real = lazy_and_real(head, 6)
    labels = torch.tensor([1, 3, 3, 0, 10, 7])
    torch.testing.assert_close(F.cross_entropy(lazy, labels, **options), F.cross_entropy(real, labels, **options))
    assert len(head.asked) == 1


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"weight": torch.rand(11)}, {"reduction": "none"}],
    ids=["label smoothing", "class weights", "a loss per token"],
)
def test_another_cross_entropy_gets_the_logits(head, options):
    lazy, real = lazy_and_real(head, 6)
    labels = torch.tensor([1, 3, 3, 0, 10, 7])
    torch.testing.assert_close(F.cross_entropy(lazy, labels, **options), F.cross_entropy(real, labels, **options))
    assert not head.asked


def test_labels_that_are_probabilities_get_the_logits(head):
    lazy, real = lazy_and_real(head, 6)
    labels = torch.rand(6, 11).softmax(-1)
    torch.testing.assert_close(F.cross_entropy(lazy, labels), F.cross_entropy(real, labels))
    assert not head.asked


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
def test_a_scale_and_a_softcap_are_noted(head, between, softcap, scale):
    lazy, real = lazy_and_real(head, 6)
    labels = torch.arange(6)
    torch.testing.assert_close(between(lazy).materialize(), between(real))
    loss = F.cross_entropy(between(lazy).float(), labels)
    (request,) = head.asked
    assert (request.softcap, request.scale) == (softcap, pytest.approx(scale))
    torch.testing.assert_close(loss, F.cross_entropy(between(real), labels))


@pytest.mark.parametrize(
    "between",
    [torch.tanh, lambda x: torch.tanh(x) * 2.0 * 3.0, lambda x: torch.tanh(x) / 2.0, lambda x: x + 1.0, lambda x: -x],
    ids=["tanh alone", "a scaled softcap", "a softcap below", "a sum", "the negative"],
)
def test_other_arithmetic_gets_the_logits(head, between):
    lazy, real = lazy_and_real(head, 6)
    labels = torch.arange(6)
    torch.testing.assert_close(F.cross_entropy(between(lazy), labels), F.cross_entropy(between(real), labels))
    assert not head.asked
