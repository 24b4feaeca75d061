"""A vendor's plugin brings a device, a kernel for it and a preset: nothing in the core knows of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import veomni_core
from models import assert_equal_steps, build, step
from veomni_conformance.ledger import Certificate, record
from veomni_conformance.this_machine import ThisMachine
from veomni_core import OpsConfig, binding_of, build_foundation_model
from veomni_core.discovery.discover import discover
from veomni_core.errors import KernelUnavailableError, UnknownNameError

PLUGIN = """
    from veomni_core import DeviceSpec, Hardware, HardwareRequirement, KernelSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1
    HPU = HardwareRequirement("hpu")
    PRESET = {"rms_norm_implementation": "hpu", "moe_implementation": "hpu"}
    calls = []

    def detect():
        return Hardware("hpu", name="Gaudi 3", count=8, detected=True)

    def rms_norm(x, weight, eps):
        import torch

        calls.append(tuple(x.shape))
        return weight * torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)

    @hookimpl
    def veomni_devices():
        return [DeviceSpec("hpu", "{module}:detect", {"gaudi3": Hardware("hpu", name="Gaudi 3")}, PRESET)]

    @hookimpl
    def veomni_kernels():
        return [
            KernelSpec("hpu", "rms_norm", "standard", "{module}:rms_norm", HPU),
            KernelSpec("hpu", "moe_experts", "standard", "{module}:absent", HPU),
        ]
"""


@pytest.fixture
def plugin(install):
    """The name of the installed plugin's module."""
    return install("veomni-hpu", PLUGIN)


def certify(registry):
    """As after ``veomni verify`` of the norm on this machine."""
    machine, (spec,) = ThisMachine(registry.detect_hardware()), registry.kernels("rms_norm")
    checked = [machine.checked(spec, registry.plugin_of(spec), dtype) for dtype in spec.dtypes]
    record([Certificate.of_today(each, {"odd": (0.1, 0.1)}) for each in checked], {})


def train(values, registry):
    """One step of a tiny Llama built from a config, with the model."""
    eager = build("llama")
    ops = OpsConfig.from_dict(values, registry)
    model = build_foundation_model(
        eager.config, ops_implementation=ops, torch_dtype="float32", init_device="cpu", device="hpu"
    )
    model.load_state_dict(eager.state_dict())
    return model, step(model.train())


@pytest.mark.parametrize(
    "values", [{"preset": "hpu"}, {"preset": "auto"}, {"preset": "eager", "rms_norm_implementation": "hpu"}]
)
def test_a_model_trains_with_its_kernel_on_its_device(plugin, values):
    registry = discover({"VEOMNI_PLUGINS": "veomni-hpu"})
    if values["preset"] == "auto":  # who defines the op doesn't know this plugin
        certify(registry)
    model, found = train(values, registry)
    receipt = binding_of(model).receipt.to_dict()
    assert receipt["hardware"] == "hpu (Gaudi 3)"
    assert {op["op"]: op["bound"] for op in receipt["ops"] if op["bound"]} == {"rms_norm": 5}
    assert_equal_steps(found, step(build("llama")))
    assert len(__import__(plugin).calls) == 5


def test_its_preset_can_be_planned_anywhere_and_holds_only_there(plugin):
    registry = discover({})
    choices = OpsConfig.from_dict({"preset": "hpu"}, registry).choices
    filled = {choice.config_field: choice.asked for choice in choices.values() if choice.asked != "eager"}
    assert filled == {"rms_norm_implementation": "hpu", "moe_implementation": "hpu"}
    plan = veomni_core.make_plan(build("llama"), {"preset": "hpu"}, registry=registry, hardware="gaudi3")
    assert [kernel.distribution for kernel in plan.kernels] == ["veomni-hpu"]
    with pytest.raises(KernelUnavailableError, match=r"rms_norm_implementation: hpu can't run here: needs device type"):
        veomni_core.make_plan(build("llama"), {"preset": "hpu"}, registry=registry, hardware="h200")


def test_without_the_plugin_there_is_no_such_preset():
    with pytest.raises(UnknownNameError, match=r"preset: 'hpu' is unknown"):
        OpsConfig.from_dict({"preset": "hpu"}, discover({}))


def test_a_preset_that_fills_a_misspelt_field_fails_its_plugin(install):
    install("veomni-hpu", PLUGIN.replace("moe_implementation", "moe_implementatoin"))
    record = discover({}).plugin("veomni-hpu")
    assert record.status == "failed"
    assert record.problem == (
        "device type hpu: its preset fills 'moe_implementatoin', which is not a config field. "
        "Did you mean 'moe_implementation'?"
    )


def test_the_core_has_no_word_of_it():
    sources = Path(veomni_core.__file__).parent.rglob("*.py")
    assert not [source for source in sources if "hpu" in source.read_text().lower()]
