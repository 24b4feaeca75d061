"""Hooks on the output projection run once, on the tensors and gradients of eager code."""

from __future__ import annotations

import pytest
import torch
from fused_head import bound_and_eager, fused_losses
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from models import assert_equal_steps, step

FORWARD_HOOKS = {
    "halving": lambda module, inputs, logits: logits * 0.5,
    "dividing": lambda module, inputs, logits: logits / 2,
    "adding": lambda module, inputs, logits: logits + torch.arange(64.0) * 0.1,
    "in place": lambda module, inputs, logits: logits.mul_(0.5),
}


@pytest.mark.parametrize("hook", FORWARD_HOOKS.values(), ids=FORWARD_HOOKS)
def test_a_forward_hook_on_the_head_runs_once_on_the_logits(hook):
    model, eager = bound_and_eager()
    seen = []
    for each in (model, eager):
        each.lm_head.register_forward_hook(hook)
        each.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append((type(inputs[0]), logits.shape)))
    assert_equal_steps(step(model), step(eager))
    assert seen == [(torch.Tensor, (2, 9, 64))] * 2


PRE_HOOKS = {
    "casting": lambda module, inputs: (inputs[0].to(module.weight.dtype),),
    "scaling": lambda module, inputs: (inputs[0] * 2.0,),
    "reading": lambda module, inputs: print(end="" if inputs[0].detach().numel() else " "),
}


@pytest.mark.parametrize("hook", PRE_HOOKS.values(), ids=PRE_HOOKS)
def test_a_pre_hook_on_the_head_gets_the_hidden_states(hook):
    model, eager = bound_and_eager()
    for each in (model, eager):
        each.lm_head.register_forward_pre_hook(hook)
    assert_equal_steps(step(model), step(eager))
    assert fused_losses() == 1


def test_a_hook_on_every_module_gets_tensors():
    model, eager = bound_and_eager()
    handle = register_module_forward_pre_hook(
        lambda module, inputs: (inputs[0].contiguous(),) if isinstance(module, nn.Linear) else None
    )
    try:
        assert_equal_steps(step(model), step(eager))
    finally:
        handle.remove()


def scaled_input_gradient(head: nn.Module) -> None:
    head.register_full_backward_hook(lambda module, inputs, outputs: tuple(g * 0.1 for g in inputs))


def clipped_output_gradient(head: nn.Module) -> None:
    head.register_full_backward_pre_hook(lambda module, outputs: tuple(g.clamp(-1e-3, 1e-3) for g in outputs))


@pytest.mark.parametrize("register", [scaled_input_gradient, clipped_output_gradient])
def test_a_backward_hook_on_the_head_gets_the_logits_gradient(register):
    model, eager = bound_and_eager()
    seen = []
    for each in (model, eager):
        register(each.lm_head)
        each.lm_head.register_full_backward_hook(lambda module, i, o: seen.append((i[0].shape, o[0].shape)))
    assert_equal_steps(step(model), step(eager))
    assert seen == [((2, 9, 32), (2, 9, 64))] * 2
