"""Attention and experts that other code has put into transformers' tables: compared, and kept where they differ."""

from __future__ import annotations

import pytest
from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe import modeling_qwen3_moe

from models import assert_equal_steps, build, step
from veomni_core import bind, find_sites
from veomni_core.errors import CodeChangedWarning, KernelUnavailableError, SiteChangedError

AUTO = {"preset": "auto"}
THOROUGH = pytest.mark.thorough
FAMILIES = ["llama", *(pytest.param(f, marks=THOROUGH) for f in ("qwen3_moe", "gemma3_text", "deepseek_v3", "olmo2"))]
WITH_EXPERTS = ["qwen3_moe", *(pytest.param(f, marks=THOROUGH) for f in ("mixtral", "deepseek_v3", "gpt_oss"))]


def plain(module, *args, **kwargs):
    return sdpa_attention_forward(module, *args, **kwargs)


def halved(module, *args, **kwargs):
    return sdpa_attention_forward(module, *args, **kwargs)[0] * 0.5, None


def sees_all(module, query, key, value, attention_mask, **kwargs):
    """Right wherever it is given a mask, and transformers gives sdpa none where all keys before a query are seen."""
    return sdpa_attention_forward(module, query, key, value, attention_mask, **{**kwargs, "is_causal": False})


def with_attention(monkeypatch, family, name, function, mask):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, function)
    if mask is not None:
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, mask)
    models = build(family), build(family)
    for each in models:
        each.set_attn_implementation(name)
    return models


def attention_of(model):
    return next(site for site in find_sites(model) if site.op_name == "attention")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "function", "mask", "why"),
    [
        ("others", halved, sdpa_mask, "which is not standard: its values miss by 50"),
        ("sdpa", halved, sdpa_mask, "which is not standard: its values miss by 50"),
        ("others", sees_all, sdpa_mask, "which is not standard: its values miss"),
        ("others", plain, None, "masks that are neither eager attention's nor sdpa's"),
        ("others", plain, sdpa_mask, ""),
        ("others", sees_all, eager_mask, ""),
    ],
    ids=["halved", "in sdpa's place", "without is_causal", "own masks", "standard", "always masked"],
)
def test_registered_attention_is_compared_and_kept_where_it_differs(monkeypatch, family, name, function, mask, why):
    model, eager = with_attention(monkeypatch, family, name, function, mask)
    site = attention_of(model)
    assert (site.variant is None) == bool(why) and why in site.evidence
    binding = bind(model, AUTO)
    assert bool(next(op for op in binding.plan.ops if op.op_name == "attention").sites[0].bound) == (not why)
    assert_equal_steps(step(model), step(eager))


def test_naming_a_kernel_in_the_place_of_other_attention_is_refused_with_the_function(monkeypatch):
    model, _ = with_attention(monkeypatch, "llama", "others", halved, sdpa_mask)
    with pytest.raises(KernelUnavailableError, match=r"its attention 'others' is .*halved, which is not standard"):
        bind(model, {"preset": "eager", "attn_implementation": "sdpa"})


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_registered_experts_are_compared_and_kept_where_they_differ(monkeypatch, family):
    own = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    for name, times in (("same", 1.0), ("halved", 0.5), ("grouped_mm", 0.5)):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, lambda *args, times=times: own(*args) * times)
        model, eager = build(family), build(family)
        for each in (model, eager):
            each.config._experts_implementation = name
        plan = bind(model, AUTO).plan
        sites = [decision for op in plan.ops if op.op_name == "moe_experts" for decision in op.sites]
        assert all(each.bound == (name == "same") for each in sites) and sites
        assert name == "same" or f"selects {name!r}, registered by other code" in sites[0].site.evidence
        assert_equal_steps(step(model), step(eager))


def test_experts_that_are_selected_or_replaced_after_bind_are_seen(monkeypatch):
    model = build("qwen3_moe")
    binding = bind(model, AUTO)
    model.config._experts_implementation = "batched_mm"
    with pytest.warns(CodeChangedWarning, match="its experts were set from grouped_mm to batched_mm after bind"):
        model.train()
    model.config._experts_implementation = "grouped_mm"
    assert not binding.receipt.changed
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", len)
    with pytest.warns(CodeChangedWarning, match="the experts implementation 'grouped_mm' was replaced"):
        assert "model.layers.0.mlp.experts" in binding.receipt.changed


def of_own_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.sigmoid() * up


def experts_of(model):
    return [each for each in model.modules() if "gate_up_proj" in each._parameters]


@pytest.mark.parametrize("family", WITH_EXPERTS)
@pytest.mark.parametrize("implementation", ["grouped_mm", pytest.param("batched_mm", marks=THOROUGH)])
def test_experts_whose_gate_only_their_implementation_calls_keep_their_own_code(family, implementation):
    model, eager = build(family), build(family)
    for each in (model, eager):
        each.config._experts_implementation = implementation
        for experts in experts_of(each):
            experts.__class__ = type("OfOwnGate", (type(experts),), {"_apply_gate": of_own_gate})
    sites = [decision for op in bind(model, AUTO).plan.ops if op.op_name == "moe_experts" for decision in op.sites]
    assert sites and not any(each.bound for each in sites)
    assert family == "gpt_oss" or f"selects {implementation!r}, which is off by" in sites[0].site.evidence
    assert_equal_steps(step(model), step(eager))


def test_what_an_implementation_calls_and_reads_is_seen_after_bind(monkeypatch):
    model = build("qwen3_moe")
    binding, (experts, *_) = bind(model, AUTO), experts_of(model)
    for name, value in (("_apply_gate", of_own_gate), ("has_bias", True), ("is_transposed", True)):
        with pytest.raises(SiteChangedError, match=f"{name} was changed after bind"):
            setattr(experts, name, value)
    monkeypatch.setattr(moe, "_grouped_linear", len)
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "_apply_gate", of_own_gate)
    with pytest.warns(CodeChangedWarning, match=r"moe\._grouped_linear was replaced"):
        said = binding.receipt.changed["model.layers.0.mlp.experts"]
    assert "Qwen3MoeExperts._apply_gate was replaced" in said


@pytest.mark.parametrize("gate", [None, of_own_gate], ids=["usual", "its own"])
def test_for_an_implementation_that_needs_a_gpu_another_runs_in_the_proof(monkeypatch, gate):
    def needs_a_gpu(*args):
        raise RuntimeError("it needs a GPU")

    needs_a_gpu.__module__ = "transformers.integrations.moe"
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", needs_a_gpu)
    model = build("qwen3_moe")
    for experts in experts_of(model) if gate else ():
        experts.__class__ = type("OfOwnGate", (type(experts),), {"_apply_gate": gate})
    site = next(site for site in find_sites(model) if site.op_name == "moe_experts")
    assert (site.variant, "which is off by" in site.evidence) == ((None, True) if gate else ("standard", False))
