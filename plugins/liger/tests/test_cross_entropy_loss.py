"""What the contract can't ask of Liger's losses: labels, frozen inputs, no tokens, and rounding."""

from __future__ import annotations

import pytest
import torch
from small_inputs import DEVICE, labels_of, leaf

from veomni_liger import cross_entropy_loss
from veomni_ops import head_chunks


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_beyond_the_vocabulary_is_refused(label):
    labels = torch.tensor([0, label, -100])
    with pytest.raises(RuntimeError, match=r"a label is neither in \[0, 11\) nor -100"):
        cross_entropy_loss.causal(leaf(3, 8), leaf(11, 8), labels)


def test_no_gradient_is_computed_where_none_is_recorded(monkeypatch):
    asked = []
    whole = cross_entropy_loss._causal_sum

    def watched(*arguments):
        asked.append(arguments[-2:])
        return whole(*arguments)

    monkeypatch.setattr(cross_entropy_loss, "_causal_sum", watched)
    arguments = (leaf(3, 8), leaf(11, 8), labels_of(3, 11))
    with torch.no_grad():
        quiet = cross_entropy_loss.causal(*arguments)
    assert torch.equal(quiet, cross_entropy_loss.causal(*arguments).detach())
    assert asked == [(False, False), (True, True)]


def test_chunks_of_tokens_add_up_to_all_at_once(monkeypatch):
    torch.manual_seed(0)
    tensors, labels = (leaf(300, 8), leaf(11, 8), leaf(11)), labels_of(300, 11)
    found = []
    for logits in (1 << 30, 1):  # one chunk, and two of 128 tokens and one of 44
        monkeypatch.setattr(head_chunks, "LOGITS_BYTES", logits)
        loss = cross_entropy_loss.causal(tensors[0], tensors[1], labels, tensors[2])
        found.append((loss, *torch.autograd.grad(loss, tensors)))
    torch.testing.assert_close(*found)


def test_a_classifier_without_rows_has_no_loss():
    logits = torch.randn(0, 5, requires_grad=True)
    loss = cross_entropy_loss.seq_cls(logits, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss == 0 and logits.grad.shape == (0, 5)


def test_a_frozen_backbone_leaves_the_heads_gradients():
    torch.manual_seed(0)
    hidden, weight, bias, labels = leaf(9, 8), leaf(11, 8), leaf(11), labels_of(9, 11)
    trained = cross_entropy_loss.causal(hidden, weight, labels, bias)
    frozen = cross_entropy_loss.causal(hidden.detach(), weight, labels, bias)
    pairs = zip(torch.autograd.grad(frozen, (weight, bias)), torch.autograd.grad(trained, (weight, bias)), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    evaluated = cross_entropy_loss.causal(hidden.detach(), weight.detach(), labels, bias.detach())
    torch.testing.assert_close(evaluated, trained.detach())


def test_no_tokens_cost_nothing_and_give_zero_gradients():
    hidden, weight = leaf(0, 8), leaf(11, 8)
    loss = cross_entropy_loss.causal(hidden, weight, torch.zeros(0, dtype=torch.long, device=DEVICE))
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0.0 and dhidden.shape == (0, 8) and not dweight.any()


def test_a_factor_of_the_loss_is_not_rounded_to_the_gradients_dtype():
    torch.manual_seed(0)
    hidden, weight = leaf(40, 8), leaf(11, 8)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    labels = torch.arange(40, device=DEVICE) % 11
    (first,) = torch.autograd.grad(cross_entropy_loss.causal(*low, labels, num_items_in_batch=1), low[1])
    (second,) = torch.autograd.grad(cross_entropy_loss.causal(*low, labels, num_items_in_batch=8191), low[1])
    assert torch.equal(second, (first.double() / 8191).bfloat16())


def test_a_label_that_is_no_class_is_refused():
    with pytest.raises(AssertionError, match="out of bounds"):
        cross_entropy_loss.seq_cls(leaf(2, 3), torch.tensor([0, 3], device=DEVICE))


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_are_scaled_where_they_are_unless_the_graph_is_kept(kept):
    arguments = (leaf(9, 8), leaf(11, 8))
    loss = cross_entropy_loss.causal(*arguments, labels_of(9, 11))
    node = loss.grad_fn.next_functions[0][0]
    saved = [each.data_ptr() for each in node.saved_tensors[:2]]
    found = torch.autograd.grad(loss, arguments, torch.tensor(3.0, device=DEVICE), retain_graph=kept)
    assert [each.data_ptr() == where for each, where in zip(found, saved, strict=True)] == [not kept] * 2
