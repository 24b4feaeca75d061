"""What the plugin says of itself, without its library, and plans for hardware that isn't here."""

from __future__ import annotations

import subprocess
import sys

import pytest
from quack_plugin import SPECS

from veomni_conformance.given_kernels import definitions
from veomni_core import OpsConfig, Site, plan_sites
from veomni_core.descriptions.hardware import Hardware
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import KernelUnavailableError
from veomni_ops.catalog import OPS
from veomni_ops.contract import contract_for

REGISTRY = build_registry([*definitions(), PluginRecord("quack", "veomni-quack", "1", "quack", kernels=SPECS)], {})
OPS = {op.name: op for op in OPS}
HERE = Hardware("cuda", 90, name="NVIDIA H200", detected=True)


def site(op_name, variant, dtype="bfloat16"):
    return Site(op_name, op_name, "a rule", variant, "proven", dtype)


def plan(config, hardware, sites):
    config = OpsConfig.from_dict({"preset": "eager", **config}, REGISTRY, environ={})
    return plan_sites(tuple(sites), config, registry=REGISTRY, hardware=hardware)


def chosen(result):
    return {decision.op_name: each.kernel for decision in result.ops for each in decision.sites}


ALL = {
    "rms_norm_implementation": "quack",
    "rotary_pos_emb_implementation": "quack",
    "cross_entropy_loss_implementation": "quack",
    "moe_implementation": "fused_quack",
}
SITES = (
    site("rms_norm", "standard"),
    site("rotary_pos_emb", "full"),
    site("cross_entropy_loss", "causal"),
    site("moe_experts", "standard"),
)


@pytest.mark.parametrize("hardware", ["h100", "h200", "b200", "sm90"])
def test_the_values_of_the_documents_are_chosen_on_hopper_and_above(hardware):
    result = plan(ALL, hardware, SITES)
    assert chosen(result) == {
        "rms_norm": "quack",
        "rotary_pos_emb": "quack",
        "cross_entropy_loss": "quack",
        "moe_experts": "fused_quack",
    }
    assert "moe_experts/standard:fused_quack: quack-kernels>=0.6.5,<0.7" in result.assumptions


@pytest.mark.parametrize("field,value", ALL.items())
def test_an_a100_is_refused_with_the_reason(field, value):
    with pytest.raises(KernelUnavailableError) as raised:
        plan({field: value}, "a100", SITES)
    assert f"{value} can't run here: needs compute capability >= 9.0, this GPU is 8.0 (NVIDIA A100)" in str(
        raised.value
    )


@pytest.mark.parametrize("op_name,variant", [("cross_entropy_loss", "causal"), ("moe_experts", "standard")])
def test_products_are_not_offered_in_float32(op_name, variant):
    field = OPS[op_name].config_field
    with pytest.raises(KernelUnavailableError, match="computes bfloat16, float16, this site is float32"):
        plan({field: ALL[field]}, "h200", [site(op_name, variant, "float32")])


@pytest.mark.parametrize(
    "quack, compiler, fits",
    [
        ("0.4.0", "4.4.2", True),
        ("0.4.1", "4.5.3", True),
        ("0.6.5", "4.7.0", True),
        ("0.6.5", "4.8.1", True),
        ("0.3.11", "4.4.2", False),
        ("0.5.3", "4.6.0", False),
        ("0.6.4", "4.6.2", False),
        ("0.7.0", "4.8.1", False),
    ],
)
def test_versions(monkeypatch, quack, compiler, fits):
    versions = {"quack-kernels": quack, "nvidia-cutlass-dsl": compiler}
    monkeypatch.setattr("veomni_core.descriptions.hardware._installed_version", versions.get)
    assert all(bool(spec.hardware.unmet(HERE)) is not fits for spec in SPECS)


def test_a_missing_or_another_library_is_a_reason(monkeypatch):
    versions = {}
    monkeypatch.setattr("veomni_core.descriptions.hardware._installed_version", versions.get)
    (reason,) = SPECS[0].hardware.unmet(HERE)
    for wanted in ("quack-kernels>=0.6.5,<0.7", "quack-kernels>=0.4,<0.5"):
        assert f"needs {wanted}, which is not installed" in reason
    # What pip installs for quack-kernels 0.4.1, which names no newest compiler, and can't be imported with this one.
    versions.update({"quack-kernels": "0.4.1", "nvidia-cutlass-dsl": "4.8.1"})
    (reason,) = SPECS[0].hardware.unmet(HERE)
    assert reason.endswith(", or needs nvidia-cutlass-dsl>=4.4.2,<4.6, 4.8.1 is installed")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_kernel_has_a_contract_in_its_dtypes(spec):
    contract = contract_for(OPS[spec.op_name], spec.variant)
    assert set(spec.dtypes) <= contract.values.keys() & contract.gradients.keys()
    assert OPS[spec.op_name].published[spec.name] == "veomni-quack"


def test_describing_itself_imports_neither_torch_nor_quack():
    heavy = "{'torch', 'quack', 'cutlass'}"
    code = f"import sys, veomni_quack.plugin as p; p.veomni_kernels(); print(sorted({heavy} & sys.modules.keys()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
