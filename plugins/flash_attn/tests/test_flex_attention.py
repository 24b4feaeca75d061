"""FlexAttention's adapter on the CPU, where it has no gradients; test_on_a_gpu.py has the rest."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from flash_plugin import SPECS, heads, registry, without_gpu
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn.attention import flex_attention as torch_flex_attention

from models import build, tokens
from veomni_core import bind
from veomni_flash_attn import flex_attention
from veomni_ops.attention import CONTRACTS, AttentionModule, standard


@pytest.fixture
def without_compiler(monkeypatch):
    """As a CPU runs it too. PyTorch itself would still trace each call anew, which takes a second."""
    monkeypatch.setattr(flex_attention, "_compiled", lambda function: function)
    monkeypatch.setattr(torch_flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@without_gpu
@pytest.mark.usefixtures("without_compiler")
def test_it_gives_the_contract_s_values_where_it_has_no_gradients():
    computed = set(SPECS["flex_attention"].features)
    samples = CONTRACTS["standard"].samples(torch.device("cpu"), torch.float32)
    for sample in (each for each in samples if each.is_for(computed) and computed.issuperset(each.needs)):
        with torch.no_grad():
            args = [each.detach() if isinstance(each, torch.Tensor) else each for each in sample.args]
            options = {key: each.detach() if key == "s_aux" else each for key, each in sample.kwargs.items()}
            found, _ = flex_attention.standard(*args, **options)
            torch.testing.assert_close(found, standard(*args, **options)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="flex_attention does not compute dropout"):
        flex_attention.standard(AttentionModule(2), *heads(), None, dropout=0.1)


@without_gpu
@pytest.mark.usefixtures("without_compiler")
def test_under_autocast_heads_of_several_dtypes_take_its_dtype():
    """As a rotary embedding in float32 leaves them: queries and keys in float32, values as the projection gave them."""
    query, key, value = (each.detach() for each in heads(dtype=torch.float32))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, _ = flex_attention.standard(AttentionModule(2), query, key, value.bfloat16(), None)
    wanted, _ = standard(AttentionModule(2), query, key, value, None)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.thorough
@without_gpu
@pytest.mark.usefixtures("without_compiler")
def test_it_keeps_packed_sequences_apart_whatever_mask_it_is_handed():
    ids, bounds = tokens(1, 12), torch.tensor([0, 5, 12], dtype=torch.int32)
    model = build("llama", head_dim=16)
    bind(model, {"preset": "eager", "attn_implementation": "flex_attention"}, registry=registry(anywhere=True))
    with torch.no_grad():
        packed = model(ids, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits
        alone = [model(part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@without_gpu
def test_each_softcap_is_a_constant_of_its_graph():
    """As a variable of one graph for all of them, which PyTorch makes of a second number, 2.11 raises on a GPU."""
    capped = flex_attention._compiled(lambda scores, softcap: softcap * torch.tanh(scores / softcap))
    ones, before = torch.ones(3), counters["stats"]["unique_graphs"]
    for softcap in (5.0, 2.0, 3.0, 2.0):
        torch.testing.assert_close(capped(ones, softcap), softcap * torch.tanh(ones / softcap))
    assert counters["stats"]["unique_graphs"] - before == 3


@pytest.mark.thorough
@without_gpu
def test_its_masks_hold_no_number_computed_from_dynamic_sizes():
    """Inductor (2.13) takes tensors, and sizes as they are."""
    graphs = []

    def captured(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @partial(torch.compile, fullgraph=True, dynamic=True, backend=captured)
    def call(query, key, value, window, bounds):
        packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "sliding_window": window}
        return flex_attention.standard(AttentionModule(2), query, key, value, None, **packing)[0]

    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    for window, packed in itertools.product((None, 5), (None, bounds)):
        query, key, value = (each.detach() for each in heads(length=12))
        query = query if packed is not None else query[:, :, 5:]
        call(query, key, value, window, packed)
    calls = [node for graph in graphs for node in graph.graph.nodes if "flex_attention" in str(node.target)]
    held = [each.meta["example_value"] for node in calls for each in node.args[-1]]
    assert len(calls) == 4 and any(isinstance(each, torch.Tensor) for each in held)
    assert all(isinstance(each, torch.Tensor) or each.node.expr.is_Symbol for each in held)


@pytest.mark.thorough
@without_gpu
def test_it_is_compiled_for_as_many_kinds_of_masks_as_come(monkeypatch):
    compiled = []

    def counting(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    flex_attention._compiled.cache_clear()
    kinds = itertools.product((True, False), (None, 4), (None, 3.0), (torch.float32, torch.float64))
    for causal, window, softcap, dtype in kinds:  # sixteen; torch gives up after eight
        compiled.clear()
        inputs = [each.detach().to(dtype) for each in heads(length=24)]
        options = {"is_causal": causal, "sliding_window": window, "softcap": softcap}
        found, _ = flex_attention.standard(AttentionModule(2), *inputs, None, **options)
        wanted, _ = standard(AttentionModule(2), *inputs, None, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert compiled
    flex_attention._compiled.cache_clear()


@pytest.mark.thorough
@without_gpu
def test_its_compiled_graph_can_be_gone_through_twice(monkeypatch):
    """In place of FlexAttention, which has no gradients on a CPU, a function with buffers to give away."""
    monkeypatch.setattr(inductor_config, "force_disable_caches", True)
    flex_attention._compiled.cache_clear()
    compiled = flex_attention._compiled(lambda x, w: torch.exp(torch.sin(torch.sin(x) @ w)) @ w)
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    torch.autograd.grad(compiled(x, w).sum(), (x, w))  # compiles backward for one that is run once
    result = compiled(x, w)
    with pytest.raises(RuntimeError, match="donated"):
        torch.autograd.grad(result.sum(), (x, w), retain_graph=True)
    result = compiled(x, w)
    flex_attention._allow_second_backward(result)
    first = torch.autograd.grad(result.sum(), (x, w), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), (x, w)), first)
    assert functorch_config.donated_buffer
    flex_attention._compiled.cache_clear()


@pytest.fixture
def forms(monkeypatch):
    """What `flex_attention` is called with, which decides how often torch compiles it."""
    seen = set()

    def attend(query, key, value, **options):
        given = (query, key, value)
        grad = {each.requires_grad for each in given}, torch.is_grad_enabled()
        seen.add((str(grad), *(each.stride() for each in given), torch.is_autocast_enabled("cpu")))
        key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return scores.softmax(-1) @ value, SimpleNamespace(lse=scores.logsumexp(-1))

    def compiled(function):
        return attend if function is flex_attention.flex_attention else function

    monkeypatch.setattr(flex_attention, "_compiled", compiled)
    return seen


def test_every_subset_of_frozen_inputs_is_one_form(forms):
    exact = heads(dtype=torch.float32)
    wanted = torch.autograd.grad(standard(AttentionModule(2), *exact, None)[0].square().sum(), exact)
    for wants in itertools.product((True, False), repeat=3):
        given = [each.detach().requires_grad_(on) for each, on in zip(exact, wants, strict=True)]
        output, _ = flex_attention.standard(AttentionModule(2), *given, None)
        assert output.requires_grad == any(wants)
        if any(wants):
            output.square().sum().backward()
        for each, on, gradient in zip(given, wants, wanted, strict=True):
            if on:
                torch.testing.assert_close(each.grad, gradient, rtol=1e-4, atol=1e-5)
            else:
                assert each.grad is None and not each.requires_grad
    assert {form[0] for form in forms} == {"({True}, True)", "({False}, False)"} and len(forms) == 2


def test_autocast_and_calls_without_gradients_are_one_form_each(forms):
    query, key, value = heads(dtype=torch.float32)
    for context in (torch.no_grad, lambda: torch.autocast("cpu", torch.float32, enabled=False)):
        with context():
            flex_attention.standard(AttentionModule(2), query, key, value, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention.standard(AttentionModule(2), query, key, value, None)[0].dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert {form[-1] for form in forms} == {False} and {form[0] for form in forms} == {
        "({True}, True)",
        "({False}, False)",
    }


def test_heads_keep_transformers_memory_order_and_others_are_copied(forms):
    contiguous = [each.detach() for each in heads(dtype=torch.float32)]
    query, key, value = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in contiguous)
    usual = query.stride()
    flex_attention.standard(AttentionModule(2), query, key, value, None)
    assert {form[1] for form in forms} == {usual}
    odd = [torch.stack((each, each), -1)[..., 0] for each in (query, key, value)]  # every second element
    odd += [each.transpose(0, -1).contiguous().transpose(0, -1) for each in (query, key, value)]
    for given in (odd[:3], odd[3:], contiguous):
        found, _ = flex_attention.standard(AttentionModule(2), *given, None)
        torch.testing.assert_close(found, standard(AttentionModule(2), *given, None)[0], rtol=1e-4, atol=1e-5)
    assert {form[1] for form in forms} == {usual, contiguous[0].stride()}


def test_heads_of_two_dtypes_are_refused():
    query, key, value = (each.detach() for each in heads(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"flex_attention wants one dtype, but got torch\.float32, torch\.bfloat16"):
        flex_attention.standard(AttentionModule(2), query, key.bfloat16(), value, None)
