"""A kernel's ``can_run``: its limits of widths and counts are known when the plan is made, not in the first forward."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from models import build
from planned_norms import registry
from veomni_core import KernelSpec, OpsConfig, Plan, Site, find_sites, plan_sites
from veomni_core.errors import KernelUnavailableError, SpecError

NARROW = Site("rms_norm", "narrow", "norm modules", "standard", "proven", "bfloat16", sizes={"width": (64,)})
WIDE = replace(NARROW, path="wide", sizes={"width": (4096,)})
asked: list[str] = []


def at_most_1024(site):
    asked.append(site.path)
    widest = max(site.sizes["width"])
    return "" if widest <= 1024 else f"takes rows of at most 1024, this site has {widest}"


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    """The module in which a plugin keeps its ``can_run``."""
    module = ModuleType("acme_limits")
    module.at_most_1024 = at_most_1024  # type: ignore[attr-defined]
    module.broken = lambda site: site.sizes["height"]  # type: ignore[attr-defined]
    module.of_another_type = lambda site: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_limits", module)
    asked.clear()


def plan(value, *sites, can_run="acme_limits:at_most_1024"):
    kernels = (
        KernelSpec("acme", "rms_norm", "standard", "m:f", preference=90, can_run=can_run),
        KernelSpec("plain", "rms_norm", "standard", "m:f", preference=10),
    )
    config = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": value}, registry(*kernels), environ={})
    return plan_sites(sites, config, hardware="h200")


def decisions(result):
    (op,) = (op for op in result.ops if op.op_name == "rms_norm")
    return [(site.kernel, site.reason) for site in op.sites]


def test_auto_passes_over_a_kernel_that_cannot_run_at_a_site():
    (narrow, _), (wide, _) = decisions(plan("auto", NARROW, WIDE))
    assert (narrow, wide) == ("acme", "plain")


def test_a_list_goes_on_and_says_why():
    (_, why) = decisions(plan(["acme", "plain"], NARROW, WIDE))[1]
    assert why == "as asked, after: acme takes rows of at most 1024, this site has 4096"


def test_a_kernel_that_was_asked_for_by_name_leaves_the_site_eager_with_the_reason():
    first, second = decisions(plan("acme", NARROW, WIDE))
    assert first[0] == "acme"
    assert second == ("eager", "acme takes rows of at most 1024, this site has 4096")


def test_a_kernel_that_can_run_nowhere_is_refused_before_anything_is_bound():
    with pytest.raises(KernelUnavailableError, match="acme takes rows of at most 1024, this site has 4096"):
        plan("acme", WIDE)


def test_alike_sites_are_asked_about_once():
    plan("auto", NARROW, replace(NARROW, path="another"), WIDE)
    assert asked == ["narrow", "wide"]


@pytest.mark.parametrize(
    ("can_run", "why"),
    [
        ("acme_limits:broken", "can't be asked: acme_limits:broken failed: KeyError: 'height'"),
        ("acme_limits:of_another_type", "must return a string, empty if the kernel can run, not None"),
        ("acme_nowhere:limits", "can't be asked: acme_nowhere:limits failed: ModuleNotFoundError"),
    ],
)
def test_one_that_fails_refuses_its_own_kernel_alone(can_run, why):
    (chosen, reason), *_ = decisions(plan(["acme", "plain"], NARROW, can_run=can_run))
    assert chosen == "plain" and why in reason


def test_a_reference_that_is_none_is_refused():
    with pytest.raises(SpecError, match="can_run"):
        KernelSpec("acme", "rms_norm", "standard", "m:f", can_run="limits")


def test_sizes_go_through_json():
    result = plan("auto", NARROW, WIDE)
    again = Plan.from_json(result.to_json())
    assert again == result
    assert [site.site.sizes for op in again.ops for site in op.sites] == [{"width": (64,)}, {"width": (4096,)}]


def test_a_models_sizes():
    without = ("rotary_pos_emb", "linear")
    sizes = {site.op_name: site.sizes for site in find_sites(build("llama")) if site.op_name not in without}
    config = build("llama").config
    assert sizes == {
        "attention": {"head_dim": (config.head_dim,), "value_head_dim": (config.head_dim,)},
        "cross_entropy_loss": {"hidden": (config.hidden_size,), "vocabulary": (config.vocab_size,)},
        "rms_norm": {"width": (config.hidden_size,)},
        "swiglu_mlp": {"hidden": (config.hidden_size,), "intermediate": (config.intermediate_size,)},
        "token_logprobs": {"hidden": (config.hidden_size,), "vocabulary": (config.vocab_size,)},
    }


def test_a_load_balancing_sites_facts():
    (site,) = (each for each in find_sites(build("qwen3_moe")) if each.op_name == "load_balancing_loss")
    assert site.dtype == "float32" and site.sizes == {"experts": (4,), "top_k": (2,)}


def test_latent_attention_has_values_of_another_width():
    (site,) = (each for each in find_sites(build("deepseek_v3")) if each.op_name == "attention")
    assert site.sizes == {"head_dim": (16,), "value_head_dim": (8,)}


@pytest.mark.parametrize(
    ("model_type", "intermediate"), [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")]
)
def test_experts_sizes_in_either_layout(model_type, intermediate):
    model = build(model_type)
    (site, *_) = (site for site in find_sites(model) if site.op_name == "moe_experts")
    experts = getattr(model.config, "num_experts", None) or model.config.num_local_experts
    expected = {
        "experts": experts,
        "hidden": model.config.hidden_size,
        "intermediate": getattr(model.config, intermediate),
    }
    assert site.sizes == {name: (size,) for name, size in expected.items()}
