"""Native sparse attention: bound equals eager in a model that brings its modules; one that doesn't is refused."""

from __future__ import annotations

import copy

import native_sparse_model as small
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from veomni_core import OpsConfig, bind, find_sites, make_plan
from veomni_core.errors import KernelUnavailableError

FIELD = "attn_implementation"


def made():
    torch.manual_seed(0)
    model = small.SparseModel(small.SparseConfig())
    for parameter in model.parameters():  # as initialized, scores of blocks differ by little more than rounding
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def site(model):
    (first, *_) = [each for each in find_sites(model) if each.op_name == "attention"]
    return first


def step(model, tokens=45):
    ids = torch.randint(3, 64, (2, tokens), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_bound_equals_eager_also_in_gradients_of_compression_and_gates():
    model = made()
    found = site(model)
    assert (found.variant, found.path) == ("native_sparse", "layers.0"), found.evidence
    loss, gradients = step(model)
    with bind(model, {"preset": "eager", FIELD: "torch"}):
        mine, others = step(model)
        short = step(model, 3)
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert gradient.norm() > 0, name
        assert (others[name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-9, name
    torch.testing.assert_close(short, step(model, 3), rtol=1e-4, atol=1e-6)


def test_auto_leaves_it_eager_until_it_is_asked_for():
    plan = bind(made(), {"preset": "auto"}).plan
    assert not any(each.bound for op in plan.ops if op.op_name == "attention" for each in op.sites)


@pytest.mark.parametrize("kernel", ["native-sparse", "torch"])
def test_a_model_without_its_modules_is_refused(kernel):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
    with pytest.raises(KernelUnavailableError, match=f"{kernel} covers native_sparse, not standard"):
        make_plan(model, OpsConfig.from_dict({"preset": "eager", FIELD: kernel}), hardware="h200")


def with_function(monkeypatch, **globals_of_it):
    """The model, whose function has other globals."""
    for name, value in globals_of_it.items():
        monkeypatch.setattr(small, name, value)
    return made()


def test_another_function_is_refused(monkeypatch):
    def without_the_first_query(logits, seen):
        return original(logits, seen) * (torch.arange(logits.shape[-2]) > 0)[:, None]

    original = small.softmax
    found = site(with_function(monkeypatch, softmax=without_the_first_query))
    assert found.variant is None
    function = small.native_sparse_attention

    def of_one_block_more(*args, block_count, **options):
        return function(*args, block_count=block_count + 1, **options)

    monkeypatch.undo()
    found = site(with_function(monkeypatch, native_sparse_attention=of_one_block_more))
    assert found.variant is None
    assert "misses" in found.evidence or "block" in found.evidence


def test_undo_and_copies():
    model = made()
    before = step(model)
    binding = bind(model, {"preset": "eager", FIELD: "torch"})
    other = copy.deepcopy(model)
    binding.undo()
    torch.testing.assert_close(step(model), before, rtol=0, atol=0)
    torch.testing.assert_close(step(other)[0], before[0])
