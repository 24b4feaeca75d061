"""What is chosen on named hardware, what is refused and why, and how a kernel that is wrong on this GPU is kept out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from veomni_conformance import check_kernel
from veomni_conformance.cli import verify as command
from veomni_conformance.cli.verify_processes import FAILED, OK, Row
from veomni_conformance.given_kernels import definitions
from veomni_core import Hardware, OpsConfig, Site, plan_sites
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import KernelUnavailableError
from veomni_fla.plugin import veomni_kernels
from veomni_ops.catalog import OPS
from veomni_ops.contract import Size, contract_for

SPECS = tuple(veomni_kernels())
OPS = {op.name: op for op in OPS}
DELTA = next(spec for spec in SPECS if str(spec) == "chunk_gated_delta_rule/standard:fla")
KDA = next(spec for spec in SPECS if str(spec) == "kda/standard:fla")
HEADS = {"key_heads": (16,), "value_heads": (32,), "key_width": (128,), "value_width": (128,)}
H200 = Hardware("cuda", 90, name="NVIDIA H200", detected=True)


def registry(*specs):
    return build_registry([*definitions(), PluginRecord("fla", "veomni-fla", "1", "fla", kernels=specs or SPECS)], {})


def site(op_name, variant="standard", dtype="bfloat16", **sizes):
    return Site(op_name, op_name, "a rule", variant, "proven", dtype, sizes=sizes)


def plan(value, site, hardware="a100", of=None):
    of = of or registry()
    config = OpsConfig.from_dict({"preset": "eager", OPS[site.op_name].config_field: value}, of, environ={})
    return plan_sites((site,), config, registry=of, hardware=hardware)


def chosen(result):
    ((decision,),) = ([each.kernel for each in op.sites] for op in result.ops if op.sites)
    return decision


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_kernel_has_a_contract_in_its_dtypes(spec):
    contract = contract_for(OPS[spec.op_name], spec.variant)
    assert set(spec.dtypes) <= contract.values.keys() & contract.gradients.keys()
    assert OPS[spec.op_name].published[spec.name] == "veomni-fla"


@pytest.mark.parametrize(
    "op_name, variant, kernel",
    [
        ("chunk_gated_delta_rule", "standard", "fla"),
        ("kda", "standard", "fla"),
        ("causal_conv1d", "standard", "fla"),
        ("rms_norm_gated", "sigmoid", "fla"),
        ("rms_norm_gated", "standard", "eager"),
        ("rms_norm_gated", "gate_first", "eager"),
        ("mamba2_scan", "standard", "eager"),
    ],
)
def test_what_auto_takes(op_name, variant, kernel):
    assert chosen(plan("auto", site(op_name, variant))) == kernel


def test_a_plan_assumes_the_library_and_on_hopper_that_it_was_verified():
    assert "chunk_gated_delta_rule/standard:fla: fla-core>=0.6,<0.7" in plan("fla", site(DELTA.op_name)).assumptions
    verified = "chunk_gated_delta_rule/standard:fla: has passed veomni verify"
    assert verified not in plan("fla", site(DELTA.op_name)).assumptions
    assert all(verified in plan("fla", site(DELTA.op_name), each).assumptions for each in ("h200", "b200"))


@pytest.mark.parametrize(
    "kernel, where, hardware, reason",
    [
        ("fla", site("chunk_gated_delta_rule", key_width=(512,)), "h200", "takes keys of up to 256, this site has 512"),
        ("fla", site("kda", key_width=(264,)), "h200", "takes keys of up to 256, this site has 264"),
        (
            "flash_qla",
            site("chunk_gated_delta_rule", key_width=(64,), value_width=(256,)),
            "h200",
            "takes keys and values of 128, this site has 64 and 256",
        ),
        ("flash_qla", site("chunk_gated_delta_rule", **HEADS), "a100", "needs compute capability >= 9.0"),
        ("fla", site("chunk_gated_delta_rule", dtype="float16"), "h200", "computes bfloat16"),
        ("mamba_ssm", site("mamba2_scan", dtype="float32"), "h200", "computes bfloat16, float16"),
        (
            "fla",
            site("rms_norm_gated", "sigmoid", "float32", width=(16400,)),
            "h200",
            "takes rows of up to 16384 in float32, this site has 16400",
        ),
        ("fla", site("rms_norm_gated", "standard"), "h200", "covers sigmoid, not standard"),
        ("fla", site("causal_conv1d"), "t4", "needs compute capability >= 8.0"),
    ],
)
def test_what_a_library_can_not_take_is_refused_when_a_plan_is_made(kernel, where, hardware, reason):
    with pytest.raises(KernelUnavailableError) as raised:
        plan(kernel, where, hardware)
    assert reason in str(raised.value)


def test_the_convolution_of_the_package_is_refused_where_other_widths_are_needed():
    wide = replace(site("causal_conv1d"), needs=("any_width",))
    with pytest.raises(KernelUnavailableError, match="does not compute any_width, which this site needs"):
        plan("causal_conv1d", wide, "h200")
    assert chosen(plan("fla", wide, "h200")) == "fla"


def verified(spec, hardware, of):
    """What ``veomni verify`` finds on the CPU, kept as if it had been found on ``hardware``."""
    report = check_kernel(spec, "cpu", "bfloat16", largest=Size.SMALL, every_form=False)
    failures = tuple(failure for case in report.cases for failure in case.failures)
    shares = {case.sample: (min(case.worst_value, 1.0), min(case.worst_gradient, 1.0)) for case in report.cases}
    row = Row(str(spec), "bfloat16", OK if report.ok else FAILED, failures[:1], cases=shares)
    command.keep_results([row], of.plugin("fla"), hardware)


@pytest.fixture
def triton(monkeypatch):
    versions = {"fla-core": "0.6.0", "einops": "0.8.2", "triton": "3.6.0"}
    monkeypatch.setattr("veomni_core.descriptions.hardware._installed_version", versions.get)
    return versions


@pytest.mark.parametrize("spec", [DELTA, KDA], ids=str)
@pytest.mark.parametrize(
    "hardware, version", [(90, "3.4.0"), (90, "3.7.0"), (90, "3.7.1"), (100, "3.7.1"), (120, "3.8.0")]
)
def test_where_gradients_were_wrong_the_kernel_waits_for_its_check(triton, hardware, version, spec):
    triton["triton"] = version
    here = Hardware("cuda", hardware, name="a GPU", detected=True)
    result = plan("auto", site(spec.op_name, **HEADS), here, registry(spec))
    assert chosen(result) == "eager"
    (passed_by,) = result.passed_by
    assert "has not passed veomni verify in bfloat16 here, and gradients of gated delta rules were" in passed_by


@pytest.mark.parametrize(
    "spec, hardware, version",
    [
        (DELTA, 90, "3.3.1"),
        *((spec, *each) for spec in (DELTA, KDA) for each in ((90, "3.8.0"), (80, "3.6.0"), (89, "3.6.0"))),
    ],
)
def test_elsewhere_it_does_not_wait(triton, spec, hardware, version):
    triton["triton"] = version
    here = Hardware("cuda", hardware, name="a GPU", detected=True)
    assert chosen(plan("auto", site(spec.op_name, **HEADS), here, registry(spec))) == "fla"


def test_kda_is_not_taken_with_a_triton_that_does_not_compile_its_backward(triton):
    triton["triton"] = "3.3.1"
    here = Hardware("cuda", 90, name="a GPU", detected=True)
    with pytest.raises(KernelUnavailableError, match=r"needs triton>=3\.4, 3\.3\.1 is installed"):
        plan("fla", site(KDA.op_name, **HEADS), here, registry(KDA))


@pytest.mark.parametrize("planted, kernel", [("miscompiled", "eager"), ("as_compiled_well", "fla")])
def test_the_contract_decides_and_not_the_version(triton, planted, kernel):
    spec = replace(DELTA, factory=f"planted_delta_rules:{planted}")
    of = registry(spec)
    assert chosen(plan("auto", site(DELTA.op_name, **HEADS), H200, of)) == "eager"
    verified(spec, H200, of)
    result = plan("auto", site(DELTA.op_name, **HEADS), H200, of)
    assert chosen(result) == kernel
    if kernel == "eager":
        assert "failed veomni verify in bfloat16" in result.passed_by[0]
        assert "the gradient of key is off: element error" in result.passed_by[0]
        with pytest.raises(KernelUnavailableError, match="the gradient of key is off"):
            plan("fla", site(DELTA.op_name, **HEADS), H200, of)
