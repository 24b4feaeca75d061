"""Binding: per instance, exact, reversible."""

from __future__ import annotations

import copy
import re
import sys
import types

import pytest
import torch
from torch import nn

import counting_kernels
from counting_kernels import calls, counting_registry
from models import EVERY_KERNEL, FAMILIES, assert_equal_steps, assert_same_bits, build, step
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, OpsConfig, apply_plan, bind, binding_of, make_plan
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import BindingError, ConfigError, ConformanceError, KernelLoadError, UnknownNameError
from veomni_ops import rms_norm

REGISTRY = counting_registry("one")


def bound_attributes(model: nn.Module) -> list[str]:
    """The names of what a binding has put into the model's modules."""
    return [name for module in model.modules() for name in vars(module) if name == "forward" or "_veomni" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bound_model_matches_its_eager_twin_in_loss_and_every_gradient(family):
    model = build(family)
    twin = copy.deepcopy(model)
    keys = list(model.state_dict())
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    assert_equal_steps(step(model), step(twin))
    for op in binding.plan.ops:
        for decision in op.sites:
            if decision.bound:
                assert calls[(op.op_name, decision.site.variant, "one")] > 0, decision
    assert list(model.state_dict()) == keys
    binding.undo()
    assert not bound_attributes(model)
    assert_same_bits(step(model), step(twin))


def test_two_models_of_one_class_run_their_own_kernels_interleaved():
    eager, one, two = (build("qwen3_moe") for _ in range(3))
    registry = counting_registry("one", "two")
    bind(one, {"preset": "eager", "moe_implementation": "one", "rms_norm_implementation": "one"}, registry=registry)
    bind(two, {"preset": "eager", "moe_implementation": "two"}, registry=registry)
    wanted = step(eager)
    for _ in range(2):
        for model, expected in (
            (eager, {}),
            (one, {("rms_norm", "standard", "one"): 9, ("moe_experts", "standard", "one"): 2}),
            (two, {("moe_experts", "standard", "two"): 2}),
        ):
            calls.clear()
            assert_equal_steps(step(model), wanted)
            assert calls == expected


def _snapshot():
    """Every attribute of every loaded transformers and torch module and class, by identity."""
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("transformers", "torch") or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            seen[(name, attribute)] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                seen.update({(name, attribute, inner): id(v) for inner, v in list(vars(value).items())})
            if type(value) is dict and attribute.isupper():
                seen.update({(name, attribute, str(key)): id(v) for key, v in value.items()})
    return seen


def test_norms_of_one_class_keep_their_own_settings():
    model, eager = build("llama"), build("llama")
    for each in (model, eager):
        each.model.norm.variance_epsilon = 0.5
    bind(model, {"preset": "eager", "rms_norm_implementation": "one"}, registry=counting_registry("one"))
    assert_equal_steps(step(model), step(eager))


def test_binding_changes_nothing_of_transformers_or_torch():
    model, warm_up = build("qwen3_moe"), build("qwen3_moe")
    bind(warm_up, {**EVERY_KERNEL, "attn_implementation": "eager"}, registry=REGISTRY)
    step(warm_up)
    config_before = copy.deepcopy(vars(model.config))
    shared_config = model.config
    before = _snapshot()
    binding = bind(model, {**EVERY_KERNEL, "attn_implementation": "eager"}, registry=REGISTRY)
    step(model)
    after = _snapshot()
    changed = {key for key in before if after.get(key) != before[key]} | (after.keys() - before.keys())
    # Counters and caches of torch's own that any forward and backward moves.
    changed = {
        key for key in changed if key[-1] != "next_id" and not key[1].startswith("_") and "logging" not in key[0]
    }
    assert not changed
    binding.undo()
    assert vars(shared_config) == config_before and model.config is shared_config


def test_a_config_object_that_two_models_share_is_not_changed():
    one = build("llama", attn_implementation="sdpa")
    two = type(one)(one.config)
    two.config = one.config
    for module in (one, two):
        for part in module.modules():
            if hasattr(part, "config"):
                part.config = one.config
    binding = bind(one, {"preset": "eager"}, registry=REGISTRY)
    assert one.config._attn_implementation == "eager"
    assert two.config._attn_implementation == "sdpa"
    binding.undo()
    assert one.config is two.config


def _filling(value):
    def attention(module, query, key, value_states, attention_mask, **options):
        return torch.full_like(query.transpose(1, 2), value), None

    return attention


ONES, TWOS = _filling(1.0), _filling(2.0)


def test_two_attention_kernels_of_one_function_name_are_two():
    specs = tuple(KernelSpec(name, "attention", "standard", f"{__name__}:{name.upper()}") for name in ("ones", "twos"))
    registry = build_registry(
        [*definitions(), PluginRecord("filling", "veomni-filling", "1.0", __name__, kernels=specs)], {}
    )
    models = {name: build("llama") for name in ("ones", "twos")}
    for name, model in models.items():
        bind(model, {"preset": "eager", "attn_implementation": name}, registry=registry, training=False)
    for value, model in enumerate(models.values(), start=1):
        attention = model.model.layers[0].self_attn
        attention.o_proj = nn.Identity()
        angles = (torch.ones(1, 3, 8), torch.ones(1, 3, 8))
        output, _ = attention(torch.randn(1, 3, 32), position_embeddings=angles, attention_mask=None)
        assert (output == value).all()


def test_undo_as_a_context_manager_and_only_once():
    model = build("llama")
    with bind(model, EVERY_KERNEL, registry=REGISTRY) as binding:
        assert binding_of(model) is binding and binding.active
    assert binding_of(model) is None and not binding.active
    assert not bound_attributes(model)
    with pytest.raises(BindingError, match="already undone"):
        binding.undo()


def test_undo_leaves_what_others_set_since():
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY)
    norm = model.model.norm
    norm.forward = ours = types.MethodType(lambda self, x: x, norm)
    assert list(binding.receipt.changed) == ["model.norm"]
    assert "a forward of its own, set to" in binding.receipt.changed["model.norm"]
    binding.undo()
    assert norm.forward is ours
    del norm.forward
    assert_same_bits(step(model), step(build("llama")))


def test_binding_twice_is_refused():
    model = build("llama")
    bind(model, EVERY_KERNEL, registry=REGISTRY)
    with pytest.raises(BindingError, match="bound already"):
        bind(model, EVERY_KERNEL, registry=REGISTRY)


def test_use_kernels_is_refused():
    model = build("llama")
    model._use_kernels = True
    with pytest.raises(BindingError, match="use_kernels=True"):
        bind(model, EVERY_KERNEL, registry=REGISTRY)


def test_what_is_no_model_is_refused():
    with pytest.raises(BindingError, match=r"needs a torch.nn.Module, not a dict"):
        bind({}, EVERY_KERNEL, registry=REGISTRY)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"registry": 3}, "registry: expected a Registry, as of discover(), got 3 (int)"),
        ({"batch": "x"}, "batch: expected two whole numbers above 0, of sequences and their length, got 'x' (str)"),
        ({"batch": (-1, 3)}, "got (-1, 3) (tuple)"),
        ({"batch": (2.5, float("nan"))}, "got (2.5, nan) (tuple)"),
        ({"batch": (True, 3)}, "got (True, 3) (tuple)"),
        ({"verify": "no"}, "verify: expected True or False, got 'no' (str)"),
        ({"training": 1}, "training: expected True or False, got 1 (int)"),
        ({"agree": None}, "agree: expected True or False, got nothing"),
        ({"agreement_timeout": float("nan")}, "agreement_timeout: expected seconds above 0, got nan (float)"),
        ({"agreement_timeout": -1}, "agreement_timeout: expected seconds above 0, got -1 (int)"),
    ],
    ids=str,
)
def test_an_argument_that_means_nothing_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        bind(nn.Linear(2, 2), {"preset": "auto"}, **{"registry": REGISTRY, **arguments})


def test_a_model_without_sites_binds_to_nothing():
    binding = bind(nn.Linear(2, 2), {"preset": "auto"}, registry=REGISTRY)
    assert all(not op.sites for op in binding.plan.ops)


def test_verify_runs_the_kernels_on_this_device_first(install, monkeypatch):
    model = build("llama")
    binding = bind(model, EVERY_KERNEL, registry=REGISTRY, verify=True)
    assert "rms_norm/standard:one on cpu in float32" in binding.receipt.verified
    binding.undo()

    kernel = "counting__rms_norm__standard__wrong"
    monkeypatch.setattr(counting_kernels, kernel, lambda x, w, eps: -rms_norm.standard(x, w, eps), raising=False)
    config = {"preset": "eager", "rms_norm_implementation": "wrong"}
    with pytest.raises(ConformanceError, match="rms_norm/standard:wrong on cpu in float32 breaks its contract"):
        bind(model, config, registry=counting_registry("wrong", ops=("rms_norm",)), verify=True)
    assert binding_of(model) is None


def test_a_kernel_that_does_not_load_leaves_the_model_as_it_was():
    spec = KernelSpec("broken", "rms_norm", "standard", "a_library_that_is_not_here:kernel")
    registry = build_registry([*definitions(), PluginRecord("p", "veomni-p", "1", "p", kernels=(spec,))], {})
    model = build("llama")
    with pytest.raises(
        KernelLoadError, match="rms_norm/standard:broken: a_library_that_is_not_here:kernel failed: Modu"
    ):
        bind(model, {"preset": "eager", "rms_norm_implementation": "broken"}, registry=registry)
    assert not bound_attributes(model)


def test_a_plan_made_on_meta_binds_the_real_model():
    with torch.device("meta"):
        skeleton = build("qwen3_moe")
    plan = make_plan(skeleton, OpsConfig.from_dict(EVERY_KERNEL, REGISTRY))
    model, eager = build("qwen3_moe"), build("qwen3_moe")
    with pytest.raises(BindingError, match="to apply a finished one, call apply_plan"):
        bind(model, plan, registry=REGISTRY)
    with pytest.raises(BindingError, match="apply_plan needs a Plan, not a dict; to plan from a config, call bind"):
        apply_plan(model, EVERY_KERNEL, REGISTRY)
    apply_plan(model, plan, REGISTRY)
    assert_equal_steps(step(model), step(eager))


def test_a_plan_is_applied_with_the_registry_that_is_given_and_nothing_is_discovered(monkeypatch):
    plan = make_plan(build("llama"), EVERY_KERNEL, registry=REGISTRY)
    monkeypatch.setattr("veomni_core.binding.bind.discover", lambda: pytest.fail("discover() was called"))
    assert apply_plan(build("llama"), plan, REGISTRY).plan is plan


def test_a_wrong_setting_leaves_the_model_as_it_was():
    model = build("llama")
    plan = make_plan(model, EVERY_KERNEL, registry=REGISTRY)
    with pytest.raises(UnknownNameError, match="training_logits: 'computd' is unknown. Did you mean 'computed'"):
        apply_plan(model, plan, REGISTRY, training_logits="computd")
    with pytest.raises(UnknownNameError, match="on_change: 'warn' is unknown"):
        bind(model, EVERY_KERNEL, registry=REGISTRY, on_change="warn")
    assert not bound_attributes(model)
