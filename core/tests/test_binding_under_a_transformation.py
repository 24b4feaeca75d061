"""A binding keeps its settings, notes and guards while another transformation is on top of it."""

from __future__ import annotations

import pytest
import torch

from counting_kernels import counting_registry
from models import build, tokens
from veomni_core import bind
from veomni_core.changes.change import ForwardChange
from veomni_core.changes.transformation import Transformation
from veomni_transformers.proving.functions import current_forward

REGISTRY = counting_registry("one")
LOSS_ALONE = {"preset": "eager", "cross_entropy_loss_implementation": "one"}


class Wrapped(Transformation):
    """The model's forward, called by one on top of it: as a parallelism does."""

    name = "wrapped"

    def describe(self):
        return "the model's forward is called by another"


def bound_and_wrapped(**options):
    model = build("llama")
    binding = bind(model, {**LOSS_ALONE, **options}, registry=REGISTRY)
    beneath = current_forward(model)

    def forward(self, *args, **kwargs):
        return beneath(self, *args, **kwargs)

    wrapped = Wrapped(model)
    wrapped.apply([("", wrapped.name, ForwardChange(model, forward))])
    return model, binding, wrapped


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_its_training_logits_are_what_the_config_says(compiled):
    torch._dynamo.reset()
    model, _, _ = bound_and_wrapped(training_logits="computed")
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    ids = tokens()
    logits = run(input_ids=ids, labels=ids, use_cache=False).logits
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        model.lm_head.weight.zero_()  # what is deferred could not be computed any more
    torch.testing.assert_close(logits + 0, wanted)


def test_a_step_that_could_not_fuse_it_is_in_the_receipt():
    model, binding, _ = bound_and_wrapped()
    model.loss_function = lambda logits, labels, vocab_size, **options: logits.square().mean()
    model(input_ids=tokens(), labels=tokens())
    assert "the logits were needed" in binding.receipt.changed["the loss"]


def test_a_hook_on_a_child_of_a_wrapped_mlp_lets_it_run_its_own_code():
    model = build("llama")
    kernels = {"preset": "eager", "swiglu_mlp_implementation": "one", "on_change": "eager"}
    binding = bind(model, kernels, registry=REGISTRY)
    mlp = model.model.layers[0].mlp
    beneath, seen = current_forward(mlp), []

    def forward(self, *args, **kwargs):
        return beneath(self, *args, **kwargs)

    wrapped = Wrapped(model)
    wrapped.apply([("model.layers.0.mlp", wrapped.name, ForwardChange(mlp, forward))])
    mlp.act_fn.register_forward_hook(lambda *args: seen.append(args[0]))
    model(input_ids=tokens())
    assert seen == [mlp.act_fn]
    assert "model.layers.0.mlp" in binding.receipt.changed


def test_a_head_that_was_replaced_is_bound_by_the_binding():
    model, binding, wrapped = bound_and_wrapped()
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model(input_ids=tokens(), labels=tokens())
    bound = type(model.lm_head)
    assert bound is not torch.nn.Linear
    wrapped.undo()
    assert type(model.lm_head) is bound
    binding.undo()
    assert type(model.lm_head) is torch.nn.Linear
