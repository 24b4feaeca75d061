"""Plans for models that transformers' engine will shard: they need no ranks, and say what each rank's part is."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Shard

from counting_kernels import counting_registry
from models import EVERY_KERNEL, build
from planned_norms import vouching
from veomni_conformance.given_kernels import definitions
from veomni_core import ParallelPlan, Plan, Site, SiteRule, make_plan
from veomni_core.descriptions.sharding import Sharding
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import ConfigError, HostError, KernelUnavailableError, SpecError
from veomni_transformers.engine.engine_layout import EngineLayout, parts
from veomni_transformers.engine.layout import distributed_config_of

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has a distributed engine since 5.21"
)
REGISTRY = counting_registry("one")


def plan_of(family: str, config: dict | None = None, registry=REGISTRY, sizes: dict | None = None, **layout) -> Plan:
    with torch.device("meta"):
        model = build(family, **(sizes or {}))
    return make_plan(model, config or EVERY_KERNEL, registry=registry, hardware="cpu", distributed_config=layout)


def sites_of(plan: Plan, op_name: str) -> dict[str, Site]:
    [op] = [op for op in plan.ops if op.op_name == op_name]
    return {decision.site.path: decision.site for decision in op.sites}


def test_sites_have_the_sizes_of_a_rank_s_part():
    divided = plan_of("qwen3_moe", fsdp_size=4, ep_size=2)
    experts = sites_of(divided, "moe_experts")["model.layers.1.mlp.experts"]
    assert experts.sharding == Sharding(fsdp=2, ep=2)
    assert experts.sizes == {"experts": (2,), "hidden": (32,), "intermediate": (24,)}
    assert experts.needs == ("expert_parallel",)
    assert sites_of(divided, "rms_norm")["model.norm"].sharding == Sharding(fsdp=4)

    of_tensors = plan_of("qwen3_moe", tp_size=2)
    experts = sites_of(of_tensors, "moe_experts")["model.layers.1.mlp.experts"]
    assert (experts.sharding, experts.sizes["intermediate"], experts.needs) == (Sharding(tp=2), (12,), ())
    mlp = sites_of(plan_of("llama", fsdp_size=2, tp_size=2), "swiglu_mlp")["model.layers.0.mlp"]
    assert (str(mlp.sharding), mlp.sizes["intermediate"]) == ("FSDP2 over 2, tensors over 2", (24,))
    uneven = plan_of("llama", tp_size=2, sizes={"intermediate_size": 33, "vocab_size": 65})
    assert sites_of(uneven, "swiglu_mlp")["model.layers.0.mlp"].sizes["intermediate"] == (17, 16)
    loss = sites_of(uneven, "cross_entropy_loss")[""]
    assert (loss.variant, loss.sizes["vocabulary"]) == ("vocabulary_parallel", (33, 32))


def test_a_plan_shows_the_sharding_and_another_layout_is_another_plan():
    plan = plan_of("qwen3_moe", fsdp_size=4, ep_size=2)
    assert "FSDP2 over 2, experts over 2" in plan.table().replace("\n", " ")
    again = Plan.from_json(plan.to_json())
    assert again.sha256 == plan.sha256 and sites_of(again, "moe_experts") == sites_of(plan, "moe_experts")
    other = plan_of("qwen3_moe", fsdp_size=4, ep_size=4)
    assert any("(FSDP2 over 2, experts over 2) -> one (experts over 4)" in line for line in plan.diff(other))
    assert plan_of("qwen3_moe").sha256 == plan_of("qwen3_moe", fsdp_size=1, tp_size=1).sha256


def test_a_kernel_that_does_not_declare_it_is_not_given_a_rank_s_experts():
    [record] = [each for each in (*definitions(), *REGISTRY.plugins) if each.name == "counting"]
    kernels = tuple(replace(spec, expert_parallel=False) for spec in record.kernels)
    registry = build_registry([*definitions(), replace(record, kernels=kernels)], {})
    registry = vouching(registry, *kernels, distribution=record.distribution)
    assert {d.kernel for d in _decisions(plan_of("mixtral", registry=registry, tp_size=2), "moe_experts")} == {"one"}
    divided = plan_of("mixtral", registry=registry, fsdp_size=2, ep_size=2)
    reasons = {(d.kernel, d.reason) for d in _decisions(divided, "moe_experts")}
    assert reasons == {("eager", "one does not compute expert_parallel, which this site needs")}
    with pytest.raises(KernelUnavailableError, match="does not compute expert_parallel"):
        plan_of("mixtral", {"preset": "eager", "moe_implementation": "one"}, registry, fsdp_size=2, ep_size=2)


def _decisions(plan: Plan, op_name: str):
    [op] = [op for op in plan.ops if op.op_name == op_name]
    return op.sites


@pytest.mark.parametrize(
    "family, tp_plan, op_name, why",
    [
        ("llama", {"model.norm": "sequence_parallel"}, "rms_norm", "a norm's kernel takes plain tensors"),
        (
            "llama",
            {"model.layers.*.mlp.up_proj": "colwise_gather_output"},
            "swiglu_mlp",
            "matching parts of gate and up",
        ),
        (
            "mixtral",
            {"model.layers.*.mlp.experts.down_proj": "colwise"},
            "moe_experts",
            "whole experts, or equal parts",
        ),
        ("llama", {"lm_head": "colwise"}, "cross_entropy_loss", "the loss needs a head whose words are divided"),
    ],
)
def test_a_site_that_is_divided_in_another_way_is_refused_with_the_style(family, tp_plan, op_name, why):
    plan = plan_of(family, tp_size=2, tp_plan=tp_plan)
    refused = [site for site in sites_of(plan, op_name).values() if site.variant is None]
    style = next(iter(tp_plan.values()))
    assert refused
    assert all(why in site.evidence and style in site.evidence for site in refused)


class AttentionsOfAPlugin:
    """A rule that knows nothing of sharding."""

    def find(self, model, rule):
        for path, module in model.named_modules():
            if type(module).__name__ == "LlamaAttention":
                yield Site("swiglu_mlp", path, rule, "standard", "declared")

    def install(self, model, site, kernel, spec):
        yield from ()


def test_a_plugin_s_rule_without_sharded_binds_under_fsdp2_and_not_under_tensor_parallelism():
    rule = SiteRule("attentions of a plugin", f"{__name__}:AttentionsOfAPlugin", order=5)
    acme = PluginRecord("acme", "acme", "1", __name__, site_rules=(rule,))
    registry = build_registry([*REGISTRY.plugins, acme], {})
    for layout, variant in (({"fsdp_size": 2}, "standard"), ({"tp_size": 2}, None)):
        sites = [d.site for d in _decisions(plan_of("llama", {"preset": "eager"}, registry, **layout), "swiglu_mlp")]
        found = [site for site in sites if site.rule == rule.name]
        assert {site.variant for site in found} == {variant}
        assert all("has no method sharded" in site.evidence for site in found if variant is None)


@pytest.mark.parametrize(
    "layout, message",
    [
        ({"pp_size": 2}, "with pipeline parallelism each rank holds other layers"),
        ({"fsdp_size": 3, "ep_size": 3}, "ep_size=3 does not divide the 4 experts of model.layers.0.mlp.experts"),
        ({"tp_size": 4}, "tp_size=4 does not divide the 2 key and value heads"),
        ({"fsdp_size": 2, "tp_size": 2, "ep_size": 3}, "`ep_size` must be a multiple of `tp_size`"),
        ({"fsdp_size": 0}, "Parallelism sizes must be >= 1"),
        ({"ep_sise": 2}, "has no ep_sise; its fields are"),
        ({"tp_size": 2, "tp_plan": {"layers": "colwize"}}, "can't shard"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_there_are_ranks(layout, message):
    with pytest.raises(ConfigError, match=message):
        plan_of("qwen3_moe", **layout)


EXPERTS = "model.layers.*.mlp.experts"


def test_a_written_plan_divides_experts_as_the_model_s_own_does():
    written = ParallelPlan(
        extra_parallel_plan={"ep": {f"{EXPERTS}.{n}": Shard(0) for n in ("gate_up_proj", "down_proj")}}
    )
    own = plan_of("qwen3_moe", fsdp_size=2, ep_size=2)
    assert plan_of("qwen3_moe", fsdp_size=2, ep_size=2, ep_plan=written).sha256 == own.sha256


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"ep": {f"{EXPERTS}.gate_proj": Shard(0)}}, r"`ep_plan` keys .*experts.gate_proj'\] match nothing"),
        (
            {"ep": {f"{EXPERTS}.gate_up_proj": Shard(1)}},
            r"along their first dimension.* takes no \S+gate_up_proj: S\(1\)",
        ),
        ({"ep": {}, "emb": {"model.embed_tokens.weight": Shard(0)}}, "takes no emb"),
        (None, "extra_parallel_plan is {'ep': {path: Shard"),
        ({"ep": ["experts"]}, "extra_parallel_plan is {'ep': {path: Shard"),
    ],
)
def test_a_written_plan_that_does_not_fit_is_refused(plan, message):
    with pytest.raises(ConfigError, match=message):
        plan_of("qwen3_moe", fsdp_size=2, ep_size=2, ep_plan=ParallelPlan(extra_parallel_plan=plan))


def test_a_written_plan_is_printed_without_shapes():
    plan = ParallelPlan(extra_parallel_plan={"ep": {f"{EXPERTS}.gate_up_proj": Shard(0)}})
    assert f"{EXPERTS}.gate_up_proj │ -     │ 0" in plan.table()


def test_a_model_s_own_plan_of_parameters_that_its_experts_lack_is_refused():
    with torch.device("meta"):
        model = build("qwen3_moe")
    model.config.base_model_ep_plan = {"layers.*.mlp.experts.gate_proj": "grouped_gemm"}
    stale = type(model)._from_config(model.config)
    with pytest.raises(ConfigError, match=r"its plan divides \S+experts.gate_proj, and its experts have no such param"):
        make_plan(stale, {}, hardware="cpu", distributed_config={"fsdp_size": 2, "ep_size": 2})


def test_planning_leaves_the_model_s_own_plans_as_they_are_and_repeats_no_warning_of_the_engine(caplog, monkeypatch):
    with torch.device("meta"):
        model = build("qwen3_moe")
    plans = {name: dict(vars(model)[name]) for name in ("_tp_plan", "_ep_plan", "_fsdp_plan")}
    log = logging.getLogger("transformers.distributed.mixin")  # transformers' loggers don't propagate
    caplog.set_level(logging.WARNING, log.name)  # whatever level an earlier test left
    log.addHandler(caplog.handler)
    try:
        for layout in (
            {"tp_size": 2, "tp_plan": {"lm_head": "colwise"}},
            {"fsdp_size": 2, "fsdp_plan": {"lm_head": "free_full_weight"}},
            {"fsdp_size": 2, "ep_size": 2, "ep_plan": {"lm_head.weight": "grouped_gemm"}},
        ):
            make_plan(model, EVERY_KERNEL, registry=REGISTRY, hardware="cpu", distributed_config=layout)
            assert {name: vars(model)[name] for name in plans} == plans, layout
        with pytest.raises(ConfigError):
            make_plan(model, {}, hardware="cpu", distributed_config={"tp_size": 2, "tp_plan": {"lm_head": "colwize"}})
        assert {name: vars(model)[name] for name in plans} == plans
        monkeypatch.setattr(type(model), "_tp_plan", vars(model).pop("_tp_plan"))
        make_plan(model, {}, hardware="cpu", distributed_config={"tp_size": 2, "tp_plan": {"lm_head": "colwise"}})
        assert "_tp_plan" not in vars(model)
        assert caplog.messages == []
        model._resolve_parallel_plans(distributed_config_of({"tp_size": 2}))  # as the engine does
        assert "match nothing in Qwen3MoeForCausalLM" in caplog.text
    finally:
        log.removeHandler(caplog.handler)


def test_a_transformers_without_an_engine_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(HostError, match=r"needs the distributed engine of transformers 5\.21 or newer; this is"):
        plan_of("llama", fsdp_size=2)


def test_a_sharding_counts_ranks():
    assert parts(101, 4) == (26, 23)
    assert EngineLayout(fsdp=2, tp=2, tp_styles={"a.b": "colwise"}).of("a") == Sharding(fsdp=2, tp=2)
    assert EngineLayout(fsdp=2, tp=2, tp_styles={"a.b": "colwise"}).of("ab") == Sharding(fsdp=2)
    for wrong in (0, -1, True, "2"):
        with pytest.raises(SpecError):
            Sharding(fsdp=wrong)
