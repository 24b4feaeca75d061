"""Hardware by name, and requirements that answer with reasons."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from veomni_core import Hardware, HardwareRequirement
from veomni_core.errors import SpecError, UnknownNameError


@pytest.mark.parametrize(
    "name, device, capability",
    [
        ("cpu", "cpu", None),
        ("a100", "cuda", 80),
        ("H100", "cuda", 90),
        ("h200", "cuda", 90),
        ("b200", "cuda", 100),
        ("sm75", "cuda", 75),
        ("sm_120", "cuda", 120),
        ("mi300x", "rocm", None),
        ("a10g", "cuda", 86),
        ("l4", "cuda", 89),
        ("rtx4090", "cuda", 89),
        ("gb200", "cuda", 100),
        ("b300", "cuda", 103),
        ("rtx5090", "cuda", 120),
        ("mi355x", "rocm", None),
        ("mps", "mps", None),
    ],
)
def test_named(name, device, capability):
    hardware = Hardware.named(name)
    assert (hardware.device_type, hardware.compute_capability, hardware.detected) == (device, capability, False)


def test_an_unknown_name_is_answered_by_the_nearest():
    with pytest.raises(UnknownNameError, match="hardware 'h20' is not known. Did you mean 'h200'"):
        Hardware.named("h20")


HOPPER_OR_AMD = HardwareRequirement("cuda", min_compute_capability=90) | HardwareRequirement("rocm")


@pytest.mark.parametrize(
    "requirement, hardware, reasons",
    [
        (HardwareRequirement(), "cpu", ()),
        (HardwareRequirement("any", packages=("nowhere>=1",)), "mi300x", ()),
        (HardwareRequirement("gpu"), "a100", ()),
        (HardwareRequirement("cuda"), "cpu", ("needs device type cuda, this is cpu (cpu)",)),
        (HardwareRequirement("cuda"), "mi300x", ("needs device type cuda, this is rocm (AMD Instinct MI300X)",)),
        (
            HardwareRequirement("cuda", min_compute_capability=90),
            "a100",
            ("needs compute capability >= 9.0, this GPU is 8.0 (NVIDIA A100)",),
        ),
        (
            HardwareRequirement("cuda", min_compute_capability=80, max_compute_capability=90),
            "b200",
            ("needs compute capability <= 9.0, this GPU is 10.0 (NVIDIA B200)",),
        ),
        (HardwareRequirement("cuda", min_compute_capability=90, max_compute_capability=90), "sm90", ()),
        (HOPPER_OR_AMD, "h200", ()),
        (HOPPER_OR_AMD, "mi300x", ()),
        (HOPPER_OR_AMD, "a100", ("needs compute capability >= 9.0, this GPU is 8.0 (NVIDIA A100)",)),
        (HardwareRequirement("cuda", max_compute_capability=80) | HOPPER_OR_AMD, "h200", ()),
        (HOPPER_OR_AMD, "cpu", ("needs device type cuda or rocm, this is cpu (cpu)",)),
        (
            HardwareRequirement("cuda", max_compute_capability=80) | HOPPER_OR_AMD,
            "l40s",
            (
                "needs compute capability <= 8.0, this GPU is 8.9 (NVIDIA L40S), or "
                "needs compute capability >= 9.0, this GPU is 8.9 (NVIDIA L40S)",
            ),
        ),
    ],
)
def test_unmet(requirement, hardware, reasons):
    assert requirement.unmet(Hardware.named(hardware)) == reasons


def test_packages_are_checked_on_detected_hardware_only():
    requirement = HardwareRequirement(packages=("surely-not-installed>=2", "pluggy>=99", "packaging"))
    assert requirement.unmet(Hardware("cpu")) == ()
    missing, old = requirement.unmet(Hardware("cpu", detected=True))
    assert missing == "needs surely-not-installed>=2, which is not installed"
    assert old.startswith("needs pluggy>=99, ") and old.endswith(" is installed")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"min_compute_capability": 90, "max_compute_capability": 80}, "min_compute_capability 90 is above"),
        ({"min_compute_capability": 9}, "a compute capability of 9.0 is written as 90; got 9"),
        ({"max_compute_capability": 900}, "written as 90; got 900"),
        ({"packages": ("not a requirement!",)}, "'not a requirement!' is not a package requirement"),
    ],
)
def test_a_requirement_that_contradicts_itself(arguments, message):
    with pytest.raises(SpecError, match=message):
        HardwareRequirement("cuda", **arguments)


def test_of_alternatives_the_one_for_the_hardware_counts():
    requirement = HardwareRequirement("cuda", packages=("cuda-lib",)) | HardwareRequirement(
        "rocm", packages=("hip-lib",)
    )
    assert requirement.chosen_for(Hardware.named("mi300x")).packages == ("hip-lib",)
    assert requirement.chosen_for(Hardware.named("cpu")).packages == ("cuda-lib",)
    assert HardwareRequirement.from_dict(json.loads(json.dumps(asdict(requirement)))) == requirement
    (missing,) = requirement.unmet(Hardware("rocm", detected=True))
    assert missing == "needs hip-lib, which is not installed"


def test_three_in_any_order_are_alternatives():
    a, b, c = (HardwareRequirement(name) for name in ("cuda", "rocm", "xpu"))
    assert ((a | b) | c).others == (a | (b | c)).others == (b, c)
    with pytest.raises(SpecError, match="others"):
        HardwareRequirement("cuda", others=("rocm",))
