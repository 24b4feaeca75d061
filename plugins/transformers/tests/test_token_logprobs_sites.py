"""``token_logprobs``: when its site is bound, when a model's logits are taken in place of it, and what says so."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from own_logprobs import ALONE, own_logprobs
from torch import nn
from transformers import LlamaForCausalLM

from models import build, tokens
from veomni_core import bind, binding_of, find_sites, make_plan, token_logprobs
from veomni_core.errors import BindingError


def test_an_adapter_on_the_head_computes_the_logits_and_the_receipt_says_so(caplog):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.extra = base, nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.extra(x)

    model, ids = build("llama"), tokens(2, 9)
    binding = bind(model, ALONE)
    model.lm_head = Adapted(model.lm_head)
    with caplog.at_level(logging.WARNING):
        found = token_logprobs(model, ids).logprobs
    torch.testing.assert_close(found, own_logprobs(model, ids, ids[:, 1:])[0])
    assert "needs the logits themselves" in binding.receipt.changed["log-probabilities"]
    assert "log-probabilities runs its own code where they are asked for" in caplog.text


def test_a_compiled_model_computes_its_logits_and_the_receipt_says_so():
    model, ids = build("llama"), tokens(2, 9)
    binding = bind(model, ALONE)
    found = token_logprobs(torch.compile(model, backend="eager"), ids).logprobs
    torch.testing.assert_close(found, own_logprobs(build("llama"), ids, ids[:, 1:])[0])
    assert "in a compiled graph" in binding.receipt.changed["log-probabilities"]


def test_a_copy_and_another_model_of_the_class_are_on_their_own():
    model, other, ids = build("llama"), build("llama", seed=1), tokens(2, 9)
    bind(model, ALONE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    binding_of(model).undo()
    assert binding_of(twin).active and binding_of(other) is None
    eager = build("llama")
    with torch.no_grad():
        eager.lm_head.weight.mul_(2)
    torch.testing.assert_close(token_logprobs(twin, ids).logprobs, own_logprobs(eager, ids, ids[:, 1:])[0])


def test_no_preset_fills_the_field_and_a_plan_without_it_leaves_the_op_out():
    model = build("llama")
    for preset in ("auto", "eager", "gpu"):
        ops = make_plan(model, {"preset": preset, "attn_implementation": "eager"}, hardware="h200").ops
        assert "token_logprobs" not in {op.op_name for op in ops}
    assert [site.variant for site in find_sites(model) if site.op_name == "token_logprobs"] == ["causal"]


def test_verify_runs_the_site_as_it_is_asked():
    binding = bind(build("gemma2", final_logit_softcapping=3.0), ALONE, verify=True)
    assert "token_logprobs/causal:chunk_logprobs at 1 sites" in binding.verification.sites


class Centred(LlamaForCausalLM):
    """Its logits are more than scaled and capped."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids, labels=labels, **kwargs)
        output.logits = output.logits - output.logits.mean(-1, keepdim=True)
        return output


def test_a_model_that_needs_its_logits_is_left_eager():
    model = Centred(build("llama").config)
    (site,) = [site for site in find_sites(model) if site.op_name == "token_logprobs"]
    assert site.variant is None and "needs the logits themselves" in site.evidence


def test_a_shadow_says_that_it_does_not_compare_what_only_a_request_runs():
    from veomni_core import Shadow

    model, ids = build("llama"), tokens(2, 9)
    bind(model, {**ALONE, "rms_norm_implementation": "torch"})
    with Shadow(model) as shadow:
        model(ids)
    assert "not compared: token_logprobs/causal:chunk_logprobs: it runs only where it is asked for" in shadow.describe()
    binding_of(model).undo()
    bind(model, ALONE)
    with pytest.raises(BindingError, match="this model's plan has none in its forward"):
        Shadow(model)
