"""Deferred logits are a tensor like any other to autograd: hooks, retained gradients, repeated backwards."""

from __future__ import annotations

import pytest
import torch
from deferred_head import VOCABULARY, Head, assert_like_eager, backward
from torch.nn import functional as F

from veomni_ops import cross_entropy_loss
from veomni_transformers.forwards.deferred_logits import deferred_logits
from veomni_transformers.forwards.head_call import HeadCall


def test_in_no_grad_they_want_no_gradient():
    with torch.no_grad():
        head = Head(True)
        assert not head.logits.requires_grad and not head.loss().requires_grad
    torch.testing.assert_close(head.logits.numpy(), Head(False).logits.detach().numpy())


HOOKS = {
    "zeroing": lambda gradient: gradient * 0,
    "scaling as a step does": lambda gradient: gradient * 3.0,
    "clamping": lambda gradient: gradient.clamp(-1e-3, 1e-3),
    "reading": lambda gradient: print(end="" if gradient.norm() else " "),
    "keeping": lambda gradient: None,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_on_the_logits_gets_and_changes_their_gradient(hook):
    def run(head: Head) -> torch.Tensor:
        head.logits.register_hook(hook)
        return backward(head.loss(lambda logits: logits * 3.0))

    assert_like_eager(run)


def test_their_gradient_can_be_retained_and_asked_for():
    def retained(head: Head) -> torch.Tensor:
        head.logits.retain_grad()
        head.loss(lambda logits: torch.tanh(logits / 2.0) * 2.0).backward()
        return head.logits.grad

    assert_like_eager(retained)
    assert_like_eager(lambda head: torch.autograd.grad(head.loss(), head.logits)[0] + 0)


def test_another_loss_of_them_adds_its_gradient():
    def run(head: Head) -> torch.Tensor:
        loss = head.loss()
        head.leave_forward()
        return backward(loss + F.log_softmax(head.logits, -1).square().mean())

    assert_like_eager(run)


def test_backward_twice_works_where_the_graph_is_retained_and_is_refused_where_not():
    def run(head: Head) -> torch.Tensor:
        loss = head.loss()
        loss.backward(retain_graph=True)
        return backward(loss)

    assert_like_eager(run)
    loss = Head(True).loss()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_second_derivative_is_refused():
    head = Head(True)
    with pytest.raises(RuntimeError, match="computes no second derivatives"):
        torch.autograd.grad(head.loss(), head.leaves[0], create_graph=True)


@pytest.mark.parametrize("position", range(3), ids=["hidden", "weight", "bias"])
def test_with_the_others_frozen_one_input_gets_its_gradient(position):
    found, wanted = (_gradient_of(position, deferred) for deferred in (True, False))
    torch.testing.assert_close(found, wanted)


def _gradient_of(position: int, deferred: bool) -> torch.Tensor:
    head = Head(False)
    leaves = [leaf.detach().requires_grad_(index == position) for index, leaf in enumerate(head.leaves)]
    call = HeadCall(*leaves, cross_entropy_loss.causal)
    logits = deferred_logits(call, *leaves) if deferred else F.linear(*leaves)
    F.cross_entropy(logits.view(-1, VOCABULARY), head.labels.view(-1)).backward()
    return leaves[position].grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_logits_loss_and_gradients_are_eager_code_s(dtype):
    outcomes = []
    for deferred in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            head = Head(deferred, dtype=dtype)
            loss = head.loss()
            head.leave_forward()
        loss.backward()
        outcomes.append([loss.detach(), (head.logits + 0).detach(), *(leaf.grad for leaf in head.leaves)])
    for found, wanted in zip(*outcomes, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1])
