"""Measuring at the sites of a model: which calls are timed, once each; what can't be measured; and who is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import tuned_kernels
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3NextConfig
from tuned_kernels import CountingClock

from models import build
from planned_norms import vouching
from veomni_conformance.given_kernels import definitions
from veomni_conformance.ledger import Certificate, record
from veomni_conformance.this_machine import ThisMachine
from veomni_core import Hardware, KernelSpec, OpsConfig, discover, make_plan
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_tools.profiles.measured_choice import checked_dtypes
from veomni_tools.profiles.measured_job import MeasuredJob
from veomni_tools.profiles.profile_store import write_profile
from veomni_tools.tuning.clock import Turns
from veomni_tools.tuning.measure import Tuning
from veomni_tools.tuning.picture import picture
from veomni_tools.tuning.report import outcomes, table
from veomni_tools.tuning.shallow import shallow_model
from veomni_tools.tuning.step_model import StepModel
from veomni_tools.tuning.survey import Survey

CPU, BATCH, TURNS = Hardware.cpu(), (2, 8), Turns(least=3, most=3)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}


def hybrid(layers):
    return Qwen3NextConfig(
        **SHAPE,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )


def norm(name, preference=50, dtypes=("float32",)):
    return KernelSpec(name, "rms_norm", "standard", f"tuned_kernels:{name}", preference=preference, dtypes=dtypes)


def registry_of(*kernels, known=None):
    known = definitions() if known is None else known
    return vouching(build_registry([*known, PluginRecord("p", "veomni-p", "1.2", "p", kernels=kernels)], {}), *kernels)


def norms_and(*other_rules):
    """The definitions, as if there were few kinds of sites: finding the others takes most of the time."""
    names = {"norm modules", *other_rules}
    known = [
        replace(each, site_rules=tuple(rule for rule in each.site_rules if rule.name in names))
        for each in definitions()
    ]
    assert sum(len(each.site_rules) for each in known) == len(names)
    return known


def certify(registry, *names):
    specs = [spec for spec in registry.plugin("p").kernels if spec.name in names]
    checked = [ThisMachine(CPU).checked(spec, registry.plugin("p"), "float32") for spec in specs]
    record([Certificate.of_today(each, {"odd width": (0.1, 0.1)}) for each in checked], {})


def llama(layers=3):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, num_hidden_layers=layers))


def tuned(model, registry, unchecked=None, clock=None):
    survey = Survey(OpsConfig.from_dict({"preset": "auto"}, registry, environ={}), CPU, None)
    surveyed = survey.of(model)
    job = MeasuredJob.of(model, BATCH, None)
    step_model = StepModel.of(shallow_model(model, surveyed, survey, "cpu"), BATCH, None)
    tuning = Tuning(survey, TURNS, clock or CountingClock())
    return survey, tuning.profile(step_model, surveyed, job, unchecked or {})


def contenders(profile, where):
    (site,) = [site for site in profile.sites if site.kind.where == where and site.kind.op_name == "rms_norm"]
    return {each.kernel: each for each in site.contenders}


def test_the_measured_best_is_taken_and_not_the_one_of_the_highest_rank():
    registry, model = registry_of(norm("cheap", 10), norm("costly", 90), known=norms_and("gated MLP modules")), llama()
    certify(registry, "cheap", "costly")
    before = make_plan(model, {"preset": "auto"}, registry=registry, hardware=CPU, batch=BATCH)
    assert {each.kernel for op in before.ops for each in op.sites if op.op_name == "rms_norm"} == {"costly"}
    survey, profile = tuned(model, registry)
    write_profile(profile)
    plan = make_plan(model, {"preset": "auto"}, registry=registry, hardware=CPU, batch=BATCH)
    norms = [each for op in plan.ops for each in op.sites if op.op_name == "rms_norm"]
    assert {each.kernel for each in norms} == {"cheap"} and len(norms) == 7
    assert norms[0].reason == (
        f"chosen by measurement: cheap 1.00 ms, eager 5.00 ms, costly 25.0 ms (profile {profile.digest})"
    )
    assert plan.profile == profile.digest and f"by measurement: profile {profile.digest}" in plan.table()
    by_rank = {each.kind: survey.by_rank(each) for each in survey.of(model)}
    found = outcomes(profile, by_rank, set())
    norm_outcome = next(each for each in found if each.site.kind.where == "model.norm")
    assert norm_outcome.sentence() == "cheap; 5.00x as fast as eager; 25.00x as fast as costly, the choice by rank"
    assert "168 ms less in a step than by declared ranks" in table(profile, found)
    assert sum(each.saved_ms for each in found) == pytest.approx(7 * 24.0)
    drawn = picture(profile, found)
    assert drawn.startswith("<svg ") and "costly" in drawn and drawn.count("<rect") == 1 + 3 * 3


def test_equal_calls_are_measured_once():
    registry = registry_of(norm("cheap"), known=norms_and())
    certify(registry, "cheap")
    clock = CountingClock()
    read = []
    clock.milliseconds = lambda call, calls: read.append(call) or CountingClock.milliseconds(clock, call, calls)
    _, profile = tuned(llama(), registry, clock=clock)
    assert [site.kind.where for site in profile.sites if site.kind.op_name == "rms_norm"] == [
        "model.layers.*.input_layernorm",
        "model.layers.*.post_attention_layernorm",
        "model.norm",
    ]
    assert len(read) == 2 * (TURNS.most + 1)  # two contenders, for one of the three kinds
    assert len({contenders(profile, site.kind.where)["cheap"].times for site in profile.sites if site.measured}) == 1


@pytest.mark.thorough
def test_a_kernel_that_can_t_be_measured_says_why_and_the_others_are():
    registry = registry_of(*(norm("cheap"), norm("out_of_memory"), norm("broken"), norm("costly")), known=norms_and())
    certify(registry, "cheap", "out_of_memory", "broken")
    wrong = {spec: "failed its check in float32: off" for spec in registry.plugin("p").kernels if spec.name == "costly"}
    _, profile = tuned(llama(1), registry, wrong)
    found = contenders(profile, "model.norm")
    assert found["cheap"].times is not None and found["eager"].times is not None
    assert found["out_of_memory"].why_not == "out of memory"
    assert found["broken"].why_not == "RuntimeError: no such device function"
    assert found["costly"].why_not == "failed its check in float32: off"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("calls", "why_not", "own"),
    [
        (3, "RuntimeError: it can't go on", ""),  # one that is recorded, and two that compile
        (4, "one of tiring, eager failed while they took turns: RuntimeError", "one of tiring, eager failed"),
    ],
)
def test_a_kernel_that_fails_later_ends_nothing_but_its_site(calls, why_not, own):
    registry = registry_of(norm("tiring"), known=norms_and())
    certify(registry, "tiring")
    tuned_kernels.calls_left[:] = [0] * calls
    _, profile = tuned(llama(1), registry)
    found = contenders(profile, "model.layers.*.input_layernorm")
    assert found["tiring"].why_not.startswith(why_not) and found["eager"].why_not.startswith(own)
    assert bool(found["eager"].times) is not bool(own)
    assert contenders(profile, "model.norm")["tiring"].why_not == "RuntimeError: it can't go on"


@pytest.mark.thorough
def test_a_site_without_a_kernel_has_nothing_to_measure():
    _, profile = tuned(llama(1), registry_of())
    assert not any(site.measured for site in profile.sites)
    assert {site.contenders[0].why_not for site in profile.sites} == {"no kernel that may be chosen could be run there"}


def certified_torch():
    """The plain PyTorch kernels, as if their checks had been run: what they compute is tested elsewhere."""
    registry, machine = discover({"VEOMNI_PLUGINS": "veomni-torch"}), ThisMachine(CPU)
    plugin = registry.plugin("veomni-torch")
    checked = [machine.checked(spec, plugin, "float32") for spec in plugin.kernels if "float32" in spec.dtypes]
    record([Certificate.of_today(each, {"one": (0.0, 0.0)}) for each in checked], {})
    return registry


@pytest.mark.thorough
def test_functions_that_a_forward_names_are_timed_by_themselves():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hybrid(layers=4))  # as few as have both kinds of layers
    _, profile = tuned(model, certified_torch())
    timed = {site.kind.op_name: site.timed for site in profile.sites if len(site.measured) > 1}
    mixer = "in Qwen3NextGatedDeltaNet at model.layers.0.linear_attn"
    assert timed["causal_conv1d"] == f"causal_conv1d_fn {mixer}"
    assert timed["chunk_gated_delta_rule"] == f"torch_chunk_gated_delta_rule {mixer}"
    assert timed["attention"].startswith("Qwen3NextAttention at model.layers.3.self_attn, without ")
    assert timed["rms_norm_gated"] == "Qwen3NextRMSNormGated at model.layers.0.linear_attn.norm"


@pytest.mark.thorough
def test_what_is_timed_is_the_op_and_little_else():
    registry = certified_torch()
    model = build("qwen3_moe")
    _, profile = tuned(model, registry, clock=None)
    timed = {site.kind.op_name: (site.timed, len(site.measured)) for site in profile.sites if site.measured}
    assert timed["attention"][0].startswith("Qwen3MoeAttention at model.layers.0.self_attn, without q_proj and k_proj")
    assert "o_proj" in timed["attention"][0]
    assert timed["cross_entropy_loss"][0] == "Qwen3MoeForCausalLM, without model"
    assert timed["load_balancing_loss"][0] == "load_balancing_loss_func in Qwen3MoeForCausalLM"
    assert timed["moe_experts"][0] == "Qwen3MoeExperts at model.layers.0.mlp.experts"
    assert all(count >= 2 for _, count in timed.values())
    _, profile = tuned(llama(1), registry)
    (mlp,) = [site for site in profile.sites if site.kind.op_name == "swiglu_mlp"]
    assert mlp.timed == "LlamaMLP at model.layers.0.mlp, without gate_proj and up_proj and down_proj"
    assert mlp.shapes == "[2, 8, 32] float32, [2, 8, 48] float32" and len(mlp.measured) == 2


@pytest.mark.thorough
def test_the_model_is_left_as_it_was():
    registry = registry_of(norm("cheap"), norm("broken"))
    certify(registry, "cheap", "broken")
    model = llama(1)
    survey = Survey(OpsConfig.from_dict({"preset": "auto"}, registry, environ={}), CPU, None)
    before = {name: (type(each), {**vars(each)}) for name, each in model.named_modules()}
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    step_model = StepModel.of(model, BATCH, None)
    job = MeasuredJob.of(model, BATCH, None)
    Tuning(survey, TURNS, CountingClock()).profile(step_model, survey.of(model), job, {})
    for name, each in model.named_modules():
        kind, attributes = before[name]
        assert type(each) is kind and vars(each).keys() == attributes.keys(), name
        assert not each._forward_hooks and not each._forward_pre_hooks
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.thorough
def test_as_few_layers_are_measured_as_have_every_kind_of_site():
    known = norms_and("gated norm modules", "attention interface")
    survey = Survey(OpsConfig.from_dict({"preset": "auto"}, registry_of(known=known), environ={}), CPU, None)
    model = llama(8)
    assert shallow_model(model, survey.of(model), survey, "cpu").config.num_hidden_layers == 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hybrid(layers=8))
    short = shallow_model(model, survey.of(model), survey, "meta")
    assert short.config.num_hidden_layers == 4 and short.config.layer_types[-1] == "full_attention"


@pytest.mark.gpu
def test_a_gpu_s_kernels_are_measured_in_bfloat16():
    registry, hardware = discover({}), Hardware.detect()
    machine, model = ThisMachine(hardware), build("qwen3_moe")
    survey = Survey(OpsConfig.from_dict({"preset": "auto"}, registry, environ={}), hardware, "bfloat16")
    surveyed = survey.of(model)
    for each in surveyed:
        for spec in each.kernels:
            plugin = registry.plugin_of(spec)
            checked = [machine.checked(spec, plugin, dtype) for dtype in checked_dtypes(spec, each.kind)]
            record([Certificate.of_today(one, {"one": (0.0, 0.0)}) for one in checked], {})
    job = MeasuredJob.of(model, (2, 64), "bfloat16")
    step_model = StepModel.of(shallow_model(model, surveyed, survey, "cuda"), (2, 64), "bfloat16")
    profile = Tuning(survey, TURNS).profile(step_model, surveyed, job, {})
    measured = {each.kernel for site in profile.sites for each in site.measured}
    assert {"eager", "triton", "fused_triton"} <= measured
    assert all(each.peak_bytes > 0 for site in profile.sites for each in site.measured)


def test_a_model_without_a_config_has_no_profile():
    assert MeasuredJob.of(nn.Linear(2, 2), BATCH, None) is None
