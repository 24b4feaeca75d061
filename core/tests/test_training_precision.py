"""Float32 weights under autocast: what is planned for them, what is refused, and that it computes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from counting_kernels import calls, counting_registry
from models import build, step
from planned_norms import vouching
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, OpsConfig, Plan, Site, apply_plan, bind, make_plan, plan_sites
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import KernelUnavailableError, UnknownNameError

HALVES = ("bfloat16", "float16")
ATTENTION = Site("attention", "", "attention interface", "standard", "proven", "float32")
EXPERTS = Site("moe_experts", "mlp.experts", "experts modules", "standard", "proven", "float32")
NORM = Site("rms_norm", "norm", "norm modules", "standard", "proven", "float32")
DOUBLE = replace(EXPERTS, dtype="float64")


def plan(site, dtypes=HALVES, autocast=None, value="lib"):
    spec = KernelSpec("lib", site.op_name, "standard", "m:f", dtypes=dtypes)
    registry = build_registry([*definitions(), PluginRecord("p", "veomni-p", "1", "p", kernels=(spec,))], {})
    registry = vouching(registry, spec)
    field = registry.op(site.op_name).config_field
    config = OpsConfig.from_dict({"preset": "eager", field: value}, registry, environ={})
    return plan_sites([site], config, hardware="h200", autocast=autocast)


def the_site(found):
    (decision,) = [site for op in found.ops for site in op.sites]
    return decision


@pytest.mark.parametrize("site", [ATTENTION, EXPERTS])
def test_float32_weights_have_a_kernel_of_16_bits_under_autocast_alone(site):
    with pytest.raises(
        KernelUnavailableError,
        match=r"lib computes bfloat16, float16, this site is float32 \(if it trains under autocast, say so: autocast=",
    ):
        plan(site)
    found = the_site(plan(site, autocast="bfloat16"))
    assert (found.kernel, found.dtypes) == ("lib", ("bfloat16",))


def test_a_kernel_that_does_not_compute_in_autocast_s_dtype_is_refused():
    with pytest.raises(KernelUnavailableError, match="lib computes float16, this site is bfloat16 under autocast"):
        plan(replace(EXPERTS, dtype="bfloat16"), dtypes=("float16",), autocast="bfloat16")
    with pytest.raises(KernelUnavailableError, match="this site is bfloat16 under autocast"):
        plan(EXPERTS, dtypes=("float32",), autocast="bfloat16")


def test_what_multiplies_nothing_must_take_both_dtypes():
    found = the_site(plan(NORM, ("float32", "bfloat16"), autocast="bfloat16"))
    assert (found.kernel, found.dtypes) == ("lib", ("float32", "bfloat16"))
    for dtypes in (("float32",), ("bfloat16",)):
        with pytest.raises(KernelUnavailableError, match="this site is float32 or bfloat16 under autocast"):
            plan(NORM, dtypes, autocast="bfloat16")


def test_autocast_leaves_float64_alone():
    with pytest.raises(KernelUnavailableError, match="this site is float64"):
        plan(DOUBLE, autocast="bfloat16")


def test_the_plan_tells_it_in_its_table_its_json_its_hash_and_its_diff():
    with_it, without = (plan(EXPERTS, autocast=autocast, value="auto") for autocast in (torch.bfloat16, None))
    assert "under autocast to bfloat16" in with_it.table() and "bfloat16" not in without.table().splitlines()[0]
    assert Plan.from_json(with_it.to_json()) == with_it
    assert with_it.sha256 != without.sha256
    assert replace(with_it, autocast=None).sha256 != with_it.sha256  # the kernels alone are not the plan
    assert without.diff(with_it) == (
        "autocast: off -> bfloat16",
        "moe_experts: eager -> lib at 1 site(s): mlp.experts",
    )


def test_a_dtype_that_nothing_is_cast_to_is_refused():
    with pytest.raises(UnknownNameError, match="autocast: 'bf16' is unknown. Did you mean 'bfloat16'"):
        plan(EXPERTS, autocast="bf16")


def half_registry():
    """Counting kernels that declare 16 bits where autocast casts, and everything elsewhere."""
    ours = counting_registry("one")
    (record,) = [record for record in ours.plugins if record.name == "counting"]
    kernels = tuple(
        replace(spec, dtypes=HALVES) if ours.op(spec.op_name).follows_autocast else spec for spec in record.kernels
    )
    found = build_registry([*definitions(), replace(record, kernels=kernels)], {})
    return vouching(found, *kernels, distribution=record.distribution)


@pytest.mark.thorough
def test_such_kernels_train_as_eager_code_does_under_autocast():
    model, eager = build("qwen3_moe"), build("qwen3_moe")
    binding = bind(model, {"preset": "auto"}, registry=half_registry(), autocast=torch.bfloat16, verify=True)
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = step(model), step(eager)
    assert {op for op, _, _ in calls} >= {"moe_experts", "cross_entropy_loss", "rms_norm"}
    assert float(found[0]) == pytest.approx(float(wanted[0]), rel=1e-2)
    receipt = binding.receipt
    assert receipt.to_dict()["autocast"] == "bfloat16" and "under autocast to bfloat16" in receipt.table()
    assert not receipt.verification.not_compared
    assert "moe_experts/standard:one on cpu in bfloat16" in receipt.verified
    assert "rms_norm/standard:one on cpu in float32" in receipt.verified


def test_without_autocast_the_same_kernels_are_left_out():
    binding = bind(build("qwen3_moe"), {"preset": "auto"}, registry=half_registry())
    bound = {op.op_name for op in binding.plan.ops if any(site.bound for site in op.sites)}
    assert "rms_norm" in bound and not bound & {"moe_experts", "cross_entropy_loss", "swiglu_mlp"}


def test_a_plan_keeps_the_autocast_that_it_was_made_for():
    model, registry = build("llama"), half_registry()
    made = make_plan(model, {"preset": "auto"}, registry=registry, autocast="bfloat16")
    with apply_plan(model, made, registry) as binding:
        assert binding.receipt.plan.autocast == "bfloat16"


def test_accelerate_s_autocast_around_a_forward_is_no_change_of_what_was_bound(bf16_accelerator):
    model = build("llama")
    binding = bind(model, {"preset": "auto"}, registry=half_registry(), autocast="bfloat16")
    prepared = bf16_accelerator.prepare_model(model)
    step(prepared)
    assert calls[("cross_entropy_loss", "causal", "one")] and not binding.receipt.changed
