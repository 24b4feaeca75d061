"""The fused losses: their options, the logits they leave out, and the models whose loss they may not take over."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from counting_kernels import calls, counting_registry
from models import EVERY_KERNEL, build, step, tokens
from veomni_core import KernelSpec, bind, find_sites
from veomni_core.errors import ConfigError
from veomni_ops import cross_entropy_loss

REGISTRY = counting_registry("one")


def test_evaluation_and_generation_give_real_logits():
    model, eager = build("llama").eval(), build("llama").eval()
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    ids = tokens()
    found, wanted = model(input_ids=ids, labels=ids), eager(input_ids=ids, labels=ids)
    assert isinstance(found.logits, torch.Tensor)
    torch.testing.assert_close(found.logits, wanted.logits)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False), eager.generate(ids, max_new_tokens=4, do_sample=False)
    )


def test_logits_in_training_are_there_for_whoever_looks():
    model, eager = build("llama"), build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    ids = tokens()
    found, wanted = model(input_ids=ids, labels=ids).logits, eager(input_ids=ids, labels=ids).logits
    torch.testing.assert_close(torch.argmax(found, dim=-1), wanted.argmax(dim=-1))
    torch.testing.assert_close(found[:, -1], wanted[:, -1])
    torch.testing.assert_close(torch.softmax(found / 2.0, dim=-1), torch.softmax(wanted / 2.0, dim=-1))
    assert found.shape == wanted.shape
    assert isinstance(model(input_ids=ids).logits, torch.Tensor)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_the_routers_loss_of_a_model_without_routers_says_so(family):
    model = build(family, mlp_only_layers=[0, 1], output_router_logits=True)
    with bind(model, {"preset": "eager", "load_balancing_loss_implementation": "one"}, registry=REGISTRY):
        with pytest.raises(ConfigError, match="output_router_logits .* no layer of this model has one"):
            model(tokens(), labels=tokens())
        assert model(tokens(), labels=tokens(), output_router_logits=False).loss > 0


def test_logits_of_a_step_can_be_read_after_undo():
    model, eager, ids = build("llama"), build("llama"), tokens()
    with bind(model, EVERY_KERNEL, registry=REGISTRY):
        output = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.logits[:, -1], eager(input_ids=ids).logits[:, -1])


@pytest.mark.parametrize("options", [{"num_items_in_batch": 5}, {"return_dict": False}, {"shift_labels": True}])
def test_the_loss_honours_its_options(options):
    model, eager = build("llama"), build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    ids = tokens()
    if options.get("shift_labels"):
        options = {"shift_labels": torch.roll(ids, -1, dims=1)}
    found, wanted = (m(input_ids=ids, labels=ids, **options) for m in (model, eager))
    torch.testing.assert_close(found[0], wanted[0])
    assert calls[("cross_entropy_loss", "causal", "one")] == 1


def test_labels_may_be_given_by_position_and_in_a_model_that_failed_before():
    model, eager = build("llama"), build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    with pytest.raises(Exception, match="."):
        model(input_ids=tokens() + 1000, labels=tokens())
    model.eval()
    assert isinstance(model(input_ids=tokens()).logits, torch.Tensor)
    model.train()
    position = list(inspect.signature(eager.forward).parameters).index("labels")
    arguments = [tokens(), *[None] * (position - 1), tokens()]
    torch.testing.assert_close(model(*arguments).loss, eager(*arguments).loss)


@pytest.mark.parametrize(
    "family, setting, options",
    [
        ("gemma3_text", {"final_logit_softcapping": 5.0}, {"softcap": 5.0, "scale": None}),
        ("cohere", {"logit_scale": 0.25}, {"softcap": None, "scale": 0.25}),
        ("granite", {"logits_scaling": 8.0}, {"softcap": None, "scale": 0.125}),
    ],
)
def test_a_softcap_or_scale_between_head_and_loss_reaches_the_kernel(family, setting, options, monkeypatch):
    seen = []
    contract = cross_entropy_loss.CONTRACTS["causal"]

    def kernel(*args, **kwargs):
        seen.append({name: kwargs[name] for name in options})
        return contract.reference(*args, **kwargs)

    monkeypatch.setattr(KernelSpec, "load", lambda spec: kernel)
    model, eager = build(family, **setting), build(family, **setting)
    bind(model, {"preset": "eager", "cross_entropy_loss_implementation": "one"}, registry=REGISTRY)
    (found, gradients), (wanted, wanted_gradients) = step(model), step(eager)
    assert seen == [options]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-6)


def test_a_clamp_between_head_and_loss_leaves_the_loss_eager():
    model = build("llama")
    head_forward = type(model.lm_head).forward

    class Clamped(type(model)):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids).last_hidden_state).clamp(-1, 1)
            return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)

    model.__class__ = Clamped
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "cross_entropy_loss"]
    assert site.variant is None
    assert "something between its output projection and its loss needs the logits" in site.evidence
    assert type(model.lm_head).forward is head_forward


def test_a_language_model_within_a_model_shares_the_outer_one_s_site():
    inner, plain = build("llama"), build("llama")

    class Outer(type(inner)):
        def __init__(self, language_model):
            nn.Module.__init__(self)
            self.language_model, self.config = language_model, language_model.config

        def get_output_embeddings(self):
            return self.language_model.lm_head

        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.language_model(input_ids=input_ids, **kwargs).logits
            return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)

    outer, ids = Outer(inner).train(), tokens()
    assert [site.path for site in find_sites(outer, REGISTRY) if site.op_name == "cross_entropy_loss"] == [""]
    bind(outer, {"preset": "eager", "cross_entropy_loss_implementation": "one"}, registry=REGISTRY)
    found = outer(input_ids=ids, labels=ids)
    torch.testing.assert_close(found.loss, plain(input_ids=ids, labels=ids).loss)
    assert calls[("cross_entropy_loss", "causal", "one")] == 1
    torch.testing.assert_close(found.logits.argmax(-1), plain(input_ids=ids).logits.argmax(-1))


def test_sequence_classification():
    config = build("llama").config
    config.num_labels = 3
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).train()
    eager = copy.deepcopy(model)
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    losses = [m(input_ids=tokens(), labels=torch.tensor([0, 2])).loss for m in (model, eager)]
    torch.testing.assert_close(*losses)
    assert calls[("cross_entropy_loss", "seq_cls", "one")] == 1
