"""Plans for an Ascend that isn't here: the presets, and kernels that are asked for on the wrong device."""

from __future__ import annotations

import pytest

from veomni_conformance.given_kernels import definitions
from veomni_core import HardwareRequirement, KernelSpec, OpsConfig, Site, plan_sites
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import KernelUnavailableError, UnknownNameError
from veomni_npu.plugin import veomni_devices, veomni_kernels

GPU_ONLY = KernelSpec("liger_kernel", "rms_norm", "standard", "m:f", HardwareRequirement("cuda"), preference=90)
REGISTRY = build_registry(
    [
        *definitions(),
        PluginRecord("gpu", "veomni-gpu", "1", "gpu", kernels=(GPU_ONLY,)),
        PluginRecord("npu", "veomni-npu", "1", "npu", kernels=tuple(veomni_kernels()), devices=tuple(veomni_devices())),
    ],
    {},
)
VARIANTS = {
    "attention": "standard",
    "rms_norm": "standard",
    "rms_norm_gated": "standard",
    "rotary_pos_emb": "full",
    "rotary_pos_emb_vision": "full",
    "swiglu_mlp": "standard",
    "cross_entropy_loss": "causal",
    "moe_experts": "standard",
    "load_balancing_loss": "standard",
}
SITES = tuple(Site(op, op, "a rule", variant, "proven", "bfloat16") for op, variant in VARIANTS.items())
CLASSIFIER = Site("cross_entropy_loss", "score", "a rule", "seq_cls", "proven", "bfloat16")


def plan(config, hardware="ascend-910b", sites=SITES):
    return plan_sites(sites, OpsConfig.from_dict(config, REGISTRY, environ={}), registry=REGISTRY, hardware=hardware)


def chosen(result):
    return {decision.op_name: site.kernel for decision in result.ops for site in decision.sites}


def test_the_gpu_preset_raises_once_for_all_fields_with_the_values_that_are_allowed():
    with pytest.raises(KernelUnavailableError) as raised:
        plan({"preset": "gpu"})
    lines = str(raised.value).splitlines()
    fields = {line.partition(":")[0] for line in lines}
    assert fields == {op.config_field for op in REGISTRY.ops.values() if op.default != "eager"}
    usable = {line.partition("_implementation")[0]: line.partition("Usable: ")[2] for line in lines}
    assert usable["rms_norm"] == usable["rotary_pos_emb"] == usable["swiglu_mlp"] == "eager, npu."
    assert usable["moe"] == "eager, fused_npu."
    assert usable["attn"] == "eager, npu_fusion_attention."
    assert usable["load_balancing_loss"] == "eager."


def test_a_job_that_names_one_field_does_not_fail_over_the_others():
    written = {"rms_norm_implementation": "npu"}
    assert chosen(plan(written)) == chosen(plan({"preset": "auto", **written}))


@pytest.mark.parametrize("hardware", ["ascend-910b", "ascend-910_93"])
def test_the_auto_preset_takes_every_npu_kernel_and_leaves_the_rest_eager(hardware):
    names = {"attention": "npu_fusion_attention", "moe_experts": "fused_npu", "load_balancing_loss": "eager"}
    result = plan({"preset": "auto"}, hardware)
    assert chosen(result) == {op: names.get(op, "npu") for op in VARIANTS}
    assert "rms_norm/standard:npu: torch-npu>=2.9" in result.assumptions


def test_a_kernel_for_gpus_is_refused_on_an_npu():
    with pytest.raises(
        KernelUnavailableError,
        match=r"can't run here: needs device type cuda, this is npu \(Ascend 910B\)\. Usable: eager, npu\.",
    ):
        plan({"preset": "eager", "rms_norm_implementation": "liger_kernel"})


def test_a_kernel_for_npus_is_refused_on_a_gpu():
    with pytest.raises(
        KernelUnavailableError,
        match=r"npu can't run here: needs device type npu, this is cuda 9\.0 \(NVIDIA H200\)\. Usable: eager, liger",
    ):
        plan({"preset": "eager", "rms_norm_implementation": "npu"}, hardware="h200")


def test_a_classifiers_loss_stays_eager_and_the_plan_says_why():
    config = {"preset": "eager", "cross_entropy_loss_implementation": "npu"}
    result = plan(config, sites=(*SITES, CLASSIFIER))
    (losses,) = [decision for decision in result.ops if decision.op_name == "cross_entropy_loss"]
    assert [site.kernel for site in losses.sites] == ["npu", "eager"]
    assert "seq_cls" in losses.sites[1].reason


def test_a_product_that_is_not_known_is_answered_by_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'ascend-910b'"):
        plan({}, hardware="ascend-910c")


@pytest.mark.parametrize(("widths", "kernel"), [((128, 768), "npu_fusion_attention"), ((128, 800), "eager")])
def test_heads_that_the_operator_does_not_take_stay_eager(widths, kernel):
    site = Site("attention", "", "a rule", "standard", "proven", "bfloat16", sizes={"head_dim": widths})
    result = plan({"preset": "auto"}, sites=(site,))
    (decision,) = (site for op in result.ops for site in op.sites)
    assert decision.kernel == kernel
    assert ("takes heads of at most 768, this site has 800" in decision.reason) == (kernel == "eager")
