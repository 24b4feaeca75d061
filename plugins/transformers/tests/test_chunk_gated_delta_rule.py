"""``chunk_gated_delta_rule``: where it is found, and that bound models compute the same."""

from __future__ import annotations

import inspect
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next import modeling_qwen3_next

from counting_kernels import calls, counting_registry
from delta_rule_models import ALONE, FAMILIES, OP, delta_sites, family
from models import off_by, step, tokens
from veomni_core import bind
from veomni_ops.chunk_gated_delta_rule import standard
from veomni_transformers.forwards.delta_rule_call import delta_rule_call
from veomni_transformers.packed.boundaries import boundaries_in


@pytest.mark.thorough(one_per=["dtype"])
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_bound_model_equals_its_own_code(name, dtype, allowed):
    model, ids = family(name, dtype=dtype), tokens(2, 70)
    loss, gradients = step(model, ids)
    with bind(model, ALONE, verify=name == "qwen3_next") as binding:
        assert [str(planned.spec) for planned in binding.plan.kernels] == [f"{OP}/standard:chunked_delta"]
        bound_loss, bound_gradients = step(model, ids)
        assert not binding.receipt.changed
    torch.testing.assert_close(bound_loss, loss, rtol=allowed, atol=0)
    assert off_by(bound_gradients, gradients) <= allowed
    assert torch.equal(step(model, ids)[0], loss)  # its own code again


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_layer_calls_the_kernel_once(name):
    model = family(name)
    sites = delta_sites(model)
    assert [(site.variant, site.own, site.sizes["value_width"]) for site in sites] == [("standard", "eager", (12,))] * 3
    calls.clear()
    with bind(model, {"preset": "eager", f"{OP}_implementation": "one"}, registry=counting_registry("one", ops=(OP,))):
        step(model)
    assert calls[(OP, "standard", "one")] == 3


@pytest.mark.thorough(one_per=[])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_parts_and_decoding_give_what_its_own_code_gives(name):
    """The second part starts from the first's states; single tokens go through the model's recurrent function."""
    model, ids = family(name).eval(), tokens(2, 30)

    def logits():
        found, cache = [], None
        for part in (ids[:, :13], ids[:, 13:27], ids[:, 27:28], ids[:, 28:29]):
            out = model(part, past_key_values=cache, use_cache=True)
            found.append(out.logits)
            cache = out.past_key_values
        return torch.cat(found, dim=1)

    with torch.no_grad():
        wanted = logits()
        with bind(model, ALONE):
            torch.testing.assert_close(logits(), wanted, rtol=1e-4, atol=1e-5)


def test_packed_sequences_give_what_they_give_alone():
    bounds = ((0, 1), (1, 10), (10, 80))
    model, ids = family("qwen3_next"), tokens(1, 80)
    ends = torch.tensor([0, 1, 10, 80], dtype=torch.int32)
    positions = torch.cat([torch.arange(last - first) for first, last in bounds]).unsqueeze(0)
    packed = {"position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(ids, **packed)
    with bind(model, {**ALONE, "causal_conv1d_implementation": "auto"}):
        together = model(ids, **packed).logits
    with torch.no_grad():
        alone = torch.cat([model(ids[:, first:last], use_cache=False).logits for first, last in bounds], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "positions, warns",
    [
        ([0, 1, 2, 9, 10], True),
        ([0, 1, 1, 2, 3], True),
        ([4, 3, 2, 1, 0], True),
        ([5, 6, 2, 3, 4], True),
        ([0, 0, 0, 0, 0], True),
        ([0, 1, 2, 0, 0], False),
        ([5, 6, 0, 1, 2], False),
    ],
)
def test_positions_that_leap_ahead_are_warned_of(positions, warns):
    given = {"input_ids": tokens(1, 5), "position_ids": torch.tensor([positions])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert boundaries_in(given)
        boundaries_in({**given, "cu_seq_lens_q": torch.tensor([0, 3, 5])})
    assert [("leap ahead" in str(each.message)) for each in caught] == [True] * warns


def test_what_a_layer_is_not_told_of_packing_is_refused():
    model = family("qwen3_next")
    numbers, rows = torch.tensor([[0] * 4 + [1] * 5]), torch.tensor([0, 4, 9, 18])
    with bind(model, {**ALONE, "causal_conv1d_implementation": "auto"}):
        layer = model.model.layers[0].linear_attn
        with pytest.raises(ValueError, match="seq_idx without cu_seq_lens_q"):
            layer(torch.zeros(1, 9, 32), seq_idx=numbers)
    call = delta_rule_call(standard)
    inputs = [torch.zeros(2, 9, 4, 8), torch.zeros(2, 9, 4, 8), torch.zeros(2, 9, 4, 6), *torch.zeros(2, 2, 9, 4)]
    with pytest.raises(ValueError, match="2 rows of packed sequences with states"):
        call(*inputs, output_final_state=True, cu_seqlens_of_rows=rows)


@pytest.mark.thorough
def test_the_receipt_says_what_the_model_would_have_run(monkeypatch):
    """Where transformers found a package, its function is not the one that is proven, and doesn't run once bound."""

    def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
        raise AssertionError("the package's function ran")

    package = ModuleType("acme_fla")
    package.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    monkeypatch.setitem(sys.modules, "acme_fla", package)
    chunk_gated_delta_rule.__module__ = "acme_fla.ops.gated_delta_rule"
    own = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    decorated = use_kernel_func_from_hub_with_fallback(OP, "acme_fla")(own)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", decorated)
    model = family("qwen3_next")
    with pytest.raises(AssertionError, match="the package's function ran"):
        model(tokens())
    name = "acme_fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    [site, *_] = delta_sites(model)
    assert (site.variant, site.own) == ("standard", name)
    assert site.evidence.endswith(f"in its place the model would run {name}")
    with bind(model, ALONE):
        model(tokens())
    # Plain PyTorch stands in for a package's function only where it is named; any other kernel by its preference too.
    field = f"{OP}_implementation"
    with bind(model, {"preset": "eager", field: "auto"}) as binding:
        [op] = [each for each in binding.plan.ops if each.op_name == OP]
        assert {site.spec for site in op.sites} == {None}
        assert {site.reason for site in op.sites} == {
            f"the model runs {name}, and chunked_delta is plain PyTorch: name it to have it"
        }
    for more, registry, kernel in (
        ({}, counting_registry("fast"), "fast"),
        ({"require": "batch_invariant"}, None, "fixed_order"),  # which the package's function doesn't promise
    ):
        with bind(model, {"preset": "eager", field: "auto", **more}, registry=registry) as binding:
            [op] = [each for each in binding.plan.ops if each.op_name == OP]
            assert {site.kernel for site in op.sites} == {kernel}


def test_a_function_that_kernels_made_a_layer_of_is_bound(monkeypatch):
    """As transformers decorates it where a version of the package ``kernels`` is installed that it takes."""
    kernels = pytest.importorskip("kernels")
    layer = kernels.use_kernel_forward_from_hub(OP)(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    assert isinstance(layer, nn.Module)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", layer)
    model = family("qwen3_next")
    wanted = step(model)
    calls.clear()
    with bind(model, {"preset": "eager", f"{OP}_implementation": "one"}, registry=counting_registry("one", ops=(OP,))):
        assert off_by(step(model)[1], wanted[1]) <= 1e-5
    assert calls[(OP, "standard", "one")] == 3
