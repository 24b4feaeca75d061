"""A platform team's plugin brings a device type that the core has never heard of."""

from __future__ import annotations

import pytest

from veomni_core import plan_sites
from veomni_core.discovery.discover import discover
from veomni_core.errors import KernelUnavailableError, UnknownNameError
from veomni_core.sites.site import Site

PLUGIN = """
    from veomni_core import DeviceSpec, Hardware, HardwareRequirement, KernelSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def detect():
        {detect}

    def kernel(x, weight, eps):
        return x

    @hookimpl
    def veomni_devices():
        return [DeviceSpec("acme", "{module}:detect", {"acme-x1": Hardware("acme", name="Acme X1")})]

    @hookimpl
    def veomni_kernels():
        return [KernelSpec("acme", "rms_norm", "standard", "{module}:kernel", HardwareRequirement("acme"))]
"""
SITES = (Site("rms_norm", "norm", "norm modules", "standard", "proven"),)
ASK = {"preset": "eager", "rms_norm_implementation": "acme"}


@pytest.fixture
def acme(install):
    def with_detection(detect: str):
        install("veomni-acme", PLUGIN.replace("{detect}", detect))
        return discover({})

    return with_detection


def test_its_products_can_be_named_and_planned_for(acme):
    registry = acme("return None")
    plan = plan_sites(SITES, ASK, registry=registry, hardware="acme-x1")
    assert [decision.kernel for decision in plan.ops[_position(plan, "rms_norm")].sites] == ["acme"]
    with pytest.raises(UnknownNameError, match=r"acme-x2.*Did you mean 'acme-x1'"):
        plan_sites(SITES, ASK, registry=registry, hardware="acme-x2")


def test_it_is_detected_before_what_torch_sees(acme):
    registry = acme("return Hardware('acme', name='Acme X1', detected=True)")
    assert registry.detect_hardware().describe() == "acme (Acme X1)"


def test_where_it_is_absent_its_kernels_are_refused_with_that_reason(acme):
    registry = acme("return None")
    with pytest.raises(
        KernelUnavailableError, match=r"acme can't run here: needs device type acme, this is cpu \(cpu\)"
    ):
        plan_sites(SITES, ASK, registry=registry, hardware="cpu")


def test_a_detection_that_fails_harms_nobody_else_and_is_told(acme, caplog):
    registry = acme("raise OSError('driver too old')")
    assert registry.detect_hardware().device_type in ("cpu", "cuda")
    assert "device type acme" in caplog.text
    assert "driver too old" in caplog.text


@pytest.mark.parametrize(
    "detect, told",
    [
        ("return True", "must return a Hardware or None, not True (bool)"),
        ("return 'acme'", "must return a Hardware or None, not 'acme' (str)"),
        ("return [Hardware('acme')]", "must return a Hardware or None, not [Hardware("),
        ("return Hardware('acme', compute_capability='new')", "compute_capability must be an integer or None"),
        ("raise SystemExit('no licence')", "no licence"),
    ],
)
def test_a_detection_that_answers_with_something_else_counts_as_absent_and_is_told(acme, caplog, detect, told):
    registry = acme(detect)
    assert plan_sites(SITES, {"preset": "auto"}, registry=registry).hardware.device_type in ("cpu", "cuda")
    assert "device type acme counts as absent: veomni_acme" in caplog.text
    assert told in caplog.text


def _position(plan, op_name):
    return [op.op_name for op in plan.ops].index(op_name)
