"""Situations whose error or result pointed elsewhere: each is right now, or says what to do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from delta_rule_models import family
from models import build
from veomni_core import OpSlot, bind
from veomni_core.errors import BindingError

AUTO = {"preset": "auto"}
MAMBA_2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4, "expand": 2}
RECURRENT = {
    "chunk_gated_delta_rule": partial(family, "qwen3_next"),
    "mamba2_scan": partial(build, "mamba2", **MAMBA_2),
    "selective_scan": partial(build, "mamba", state_size=8, time_step_rank=4),
}


class Declares(nn.Module):
    rope = OpSlot("rotary", "full")

    def forward(self, x):
        return self.rope(x) if self.rope.use_non_eager_impl else x


def test_a_slot_of_an_unknown_op_is_named_and_the_rest_is_bound():
    model, plain = build("llama"), build("llama")
    model.extra = Declares()
    plan, wanted = bind(model, AUTO).plan, bind(plain, AUTO).plan
    assert [str(each.spec) for each in plan.kernels] == [str(each.spec) for each in wanted.kernels]
    [said] = plan.failed_rules
    assert said.startswith("extra: its code declares the op 'rotary'")
    assert torch.equal(model.extra(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def test_under_fake_tensors_the_same_kernels_are_bound(family):
    model, wanted = build(family), bind(build(family), AUTO).plan
    with FakeTensorMode(allow_non_fake_inputs=True):
        plan = bind(model, AUTO).plan
    assert [str(each.spec) for each in plan.kernels] == [str(each.spec) for each in wanted.kernels]


def test_second_derivatives_name_the_op():
    model = build("llama")
    ids = torch.tensor([[5, 9, 17, 3]])
    with bind(model, {"preset": "eager", "cross_entropy_loss_implementation": "auto"}):
        loss = model.train()(input_ids=ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="choose eager for cross_entropy_loss"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.thorough
@pytest.mark.parametrize("op", RECURRENT)
def test_a_trace_of_a_bound_recurrence_names_the_op(op):
    model, ids = RECURRENT[op]().eval(), torch.tensor([[5, 9, 17, 3]])
    with bind(model, AUTO), pytest.raises(BindingError, match=f"can't record the kernel of {op}"):
        torch.jit.trace(Logits(model), ids)
