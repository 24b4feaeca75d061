"""causal_conv1d on real hybrid models: bound equals eager, and packed equals separate."""

from __future__ import annotations

import copy

import pytest
import torch
from kernels import use_kernel_forward_from_hub
from torch import nn
from transformers.models.lfm2 import modeling_lfm2

from counting_kernels import calls, counting_registry
from hybrid_models import LENGTHS, TYPES, hybrid, tokens
from models import step
from training_setups import assert_as_accurate
from veomni_core import bind, find_sites

FIELD = "causal_conv1d_implementation"
ALONE = {"preset": "eager", FIELD: "torch"}


def conv_sites(model):
    return [site for site in find_sites(model) if site.op_name == "causal_conv1d"]


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_bound_model_trains_as_the_eager_one(model_type):
    model, ids = hybrid(model_type), tokens(2, 13)
    wanted = step(model, ids)
    with bind(model, ALONE) as binding:
        (op,) = (op for op in binding.plan.ops if op.op_name == "causal_conv1d")
        assert op.sites and all(decision.site.variant == "standard" and decision.bound for decision in op.sites)
        found = step(model, ids)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    again = step(model, ids)
    assert torch.equal(again[0], wanted[0])


def distance(found, exact):
    """Of all gradients together, as a share of the exact ones: where experts are routed, single ones jump."""
    pairs = [(found[1][name].double(), gradient.double()) for name, gradient in exact[1].items()]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)) ** 0.5


# The gate of its n-grams takes a root of numbers near zero, whose slope makes of any rounding what it likes.
STEEP = "qwen4_exp_text with n-grams"


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("model_type", [name for name in TYPES if name != STEEP])
def test_in_bfloat16_it_is_as_accurate_as_the_eager_one(model_type):
    model, ids = hybrid(model_type, torch.bfloat16), tokens(2, 13)
    exact = step(copy.deepcopy(model).float(), ids)
    wanted = step(model, ids)
    bind(model, ALONE)
    found = step(model, ids)
    assert distance(found, exact) <= 1.5 * distance(wanted, exact) + 5e-3
    assert abs(float(found[0] - exact[0])) <= 2.0 * abs(float(wanted[0] - exact[0])) + 1e-2
    if "expert" not in " ".join(exact[1]) and model_type != "olmo_hybrid":  # whose dt_bias rounds by a tenth on its own
        assert_as_accurate(found, wanted, exact)


def test_every_layers_kernel_is_called_and_single_tokens_run_the_models_own_function():
    model, ids = hybrid("lfm2").eval(), tokens(1, 7)
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    calls.clear()
    with bind(model, {"preset": "eager", FIELD: "auto"}, registry=counting_registry("one")):
        found = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, wanted)
    assert calls[("causal_conv1d", "standard", "one")] == len(conv_sites(model)) == 1  # for the prompt alone


def packed_inputs(how):
    """One row of four sequences, with the boundaries given in this way for the convolution."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ends = torch.tensor(LENGTHS).cumsum(0)
    given = {
        "seq_idx": torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None].int(),
        "cu_seq_lens_q": torch.cat([torch.zeros(1, dtype=torch.long), ends]).int(),
    }
    return {"position_ids": positions, how: given[how], "use_cache": False}


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("how", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe", "lfm3"])
def test_packed_equals_separate_where_the_convolution_is_all_that_mixes_positions(model_type, how):
    """LFM2's attention finds the boundaries in position ids that restart; its convolution needs to be given them."""
    model = hybrid(model_type)
    row = tokens(1, sum(LENGTHS))
    bind(model, ALONE)
    packed = model(row, **packed_inputs(how)).logits
    separate = torch.cat([model(part, use_cache=False).logits for part in row.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    packed.square().mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    separate.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (found[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-7, name


def test_unbound_boundaries_are_refused_or_ignored_by_transformers():
    """If this changes, what the page and the record on the op say of transformers has changed."""
    model, row = hybrid("lfm2"), tokens(1, sum(LENGTHS))
    with pytest.raises(ValueError, match="packed sequences"):
        model(row, **packed_inputs("seq_idx"))
    mixed = model(row, **packed_inputs("cu_seq_lens_q")).logits
    separate = torch.cat([model(part, use_cache=False).logits for part in row.split(LENGTHS, dim=1)], dim=1)
    assert (mixed - separate).norm() > 1e-2 * separate.norm()


def test_boundaries_of_one_row_are_refused_for_a_batch_of_two():
    model = hybrid("lfm2")
    bind(model, ALONE)
    convolution = model.model.layers[0].conv
    with pytest.raises(ValueError, match="the batch has 2"):
        convolution(torch.zeros(2, 16, 64), cu_seq_lens_q=torch.tensor([0, 5, 16]))
    with pytest.raises(ValueError, match="one for each position of x"):
        convolution(torch.zeros(1, 16, 64), seq_idx=torch.zeros(1, 15, dtype=torch.int32))


@pytest.mark.thorough
def test_verified_and_undone():
    model, ids = hybrid("lfm2"), tokens(1, 9)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    binding = bind(model, ALONE, verify=True)
    assert binding.verification.sites == ("causal_conv1d/standard:torch at 1 sites",)
    assert binding.verification.not_compared == ()
    model(ids)
    binding.undo()
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


def test_the_evidence_says_what_the_model_would_have_run():
    evidence = {site.evidence for site in conv_sites(hybrid("qwen3_next"))}
    assert evidence == {
        "causal_conv1d_fn gave the reference's values and gradients; unbound, the model runs its own plain PyTorch"
    }


def test_a_function_that_kernels_made_a_layer_of_is_bound(monkeypatch):
    """As transformers' decorator gives it where a version of the package ``kernels`` is installed that it takes."""
    layer = use_kernel_forward_from_hub("causal_conv1d_fn")(modeling_lfm2.causal_conv1d_fn)
    assert isinstance(layer, nn.Module)
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", layer)
    model, ids = hybrid("lfm2"), tokens(2, 9)
    wanted = step(model, ids)
    calls.clear()
    with bind(model, {"preset": "eager", FIELD: "auto"}, registry=counting_registry("one")):
        found = step(model, ids)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert calls[("causal_conv1d", "standard", "one")] == 1


@pytest.mark.thorough
def test_a_compiled_model_has_no_graph_break_and_the_same_loss():
    torch._dynamo.reset()
    model, ids = hybrid("lfm2"), tokens(2, 13)
    wanted = step(model, ids)[0]
    bind(model, ALONE)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids, labels=ids, use_cache=False).loss, wanted, rtol=1e-5, atol=1e-6)
