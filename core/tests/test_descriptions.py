"""What a description may say: every field is checked where it is made, and one bad description harms no other."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from counting_kernels import calls, counting_registry
from veomni_conformance import check_kernel
from veomni_core import (
    CommandSpec,
    DeviceSpec,
    Hardware,
    HardwareRequirement,
    KernelSpec,
    OpsConfig,
    OpSlot,
    OpSpec,
    Site,
    SiteRule,
    bind,
    find_sites,
    plan_sites,
)
from veomni_core.discovery.discover import discover
from veomni_core.errors import KernelUnavailableError, PluginLoadError, SpecError, UnknownNameError
from veomni_ops.rms_norm import offset

KERNEL = {"name": "mine", "op_name": "rms_norm", "variant": "standard", "factory": "m:f"}
OP = {"name": "op", "variants": ("a",), "config_field": "op_implementation", "contract": "m:C"}
DEVICE = {"device_type": "acme", "detect": "m:f"}
RULE = {"name": "rule", "locator": "m:L"}
COMMAND = {"name": "verb", "target": "m:f"}

WRONG = [
    (KernelSpec, KERNEL, "name", 3),
    (KernelSpec, KERNEL, "op_name", ""),
    (KernelSpec, KERNEL, "variant", None),
    (KernelSpec, KERNEL, "factory", 3),
    (KernelSpec, KERNEL, "hardware", "cuda"),
    (KernelSpec, KERNEL, "description", None),
    (KernelSpec, KERNEL, "preference", "high"),
    (KernelSpec, KERNEL, "preference", True),
    (KernelSpec, KERNEL, "preference", 2.5),
    (KernelSpec, KERNEL, "deterministic", "yes"),
    (KernelSpec, KERNEL, "backward", 1),
    (KernelSpec, KERNEL, "expert_parallel", None),
    (KernelSpec, KERNEL, "dtypes", "float32"),
    (KernelSpec, KERNEL, "dtypes", ("bf16",)),
    (KernelSpec, KERNEL, "dtypes", (torch.bfloat16,)),
    (KernelSpec, KERNEL, "dtypes", ()),
    (KernelSpec, KERNEL, "features", "softcap"),
    (KernelSpec, KERNEL, "features", 3),
    (OpSpec, OP, "name", 3),
    (OpSpec, OP, "config_field", ""),
    (OpSpec, OP, "default", None),
    (OpSpec, OP, "variants", "standard"),
    (OpSpec, OP, "variants", ()),
    (OpSpec, OP, "contract", "nowhere"),
    (OpSpec, OP, "variant_aliases", ["b"]),
    (OpSpec, OP, "variant_aliases", {"b": "c"}),
    (OpSpec, OP, "published", {"fast": None}),
    (OpSpec, OP, "legacy_values", {1: "fast"}),
    (DeviceSpec, DEVICE, "device_type", 3),
    (DeviceSpec, DEVICE, "detect", print),
    (DeviceSpec, DEVICE, "named", {"x1": "acme"}),
    (DeviceSpec, DEVICE, "preset", {"rms_norm_implementation": ["a", "b"]}),
    (SiteRule, RULE, "name", None),
    (SiteRule, RULE, "locator", "nowhere"),
    (SiteRule, RULE, "order", "first"),
    (SiteRule, RULE, "installs_eager", 0),
    (CommandSpec, COMMAND, "name", ""),
    (CommandSpec, COMMAND, "target", None),
    (CommandSpec, COMMAND, "help", 3),
    (HardwareRequirement, {}, "device_type", None),
    (HardwareRequirement, {}, "min_compute_capability", "9.0"),
    (HardwareRequirement, {}, "max_compute_capability", 9.0),
    (HardwareRequirement, {}, "packages", "torch>=2"),
    (Hardware, {"device_type": "cuda"}, "compute_capability", "90"),
    (Hardware, {"device_type": "cuda"}, "count", "many"),
]


@pytest.mark.parametrize("kind, fields, field, value", WRONG, ids=[f"{k.__name__}.{f}={v!r}" for k, _, f, v in WRONG])
def test_a_field_of_the_wrong_type_is_named_when_it_is_described(kind, fields, field, value):
    kind(**{"device_type": "cuda", **fields} if kind is HardwareRequirement else fields)
    with pytest.raises(SpecError) as caught:
        kind(**{**fields, field: value})
    assert str(caught.value).startswith(kind.__name__)
    assert field in str(caught.value)


def test_the_record_names_the_hook_the_module_the_spec_and_the_field_and_others_live(install, install_healthy):
    install_healthy("good-plugin", "good")
    module = install("bad-plugin", plugin(more=', preference="high"'))
    registry = discover({})
    record = registry.plugin("bad-plugin")
    assert record.status == "failed"
    assert record.problem == (
        f"veomni_kernels() of {module}: KernelSpec rms_norm/standard:other: preference must be an integer, "
        "not 'high' (str)"
    )
    sites = (Site("rms_norm", "norm", "norm modules", "standard", ""),)
    (norm,) = [op for op in plan_sites(sites, {"preset": "auto"}, registry=registry, hardware="cpu").ops if op.sites]
    assert norm.chosen != ("eager",)


PLUGIN = """
    from veomni_core import KernelSpec, hookimpl

    VEOMNI_PLUGIN_API_VERSION = 1

    def kernel(x, weight, eps):
        return x

    @hookimpl
    def veomni_kernels():
        return [
            KernelSpec("kept", "rms_norm", "standard", "{module}:kernel"),
            KernelSpec("other", "{op}", "{variant}", "{module}:kernel"{more}),
        ]
"""
UNKNOWN = [
    ("rms_nrm", "standard", "op 'rms_nrm' is unknown. Did you mean 'rms_norm'?"),
    ("rms_norm", "ofset", "rms_norm has no variant 'ofset'. Did you mean 'offset'?"),
]


def plugin(op="rms_norm", variant="standard", more=""):
    return PLUGIN.replace("{op}", op).replace("{variant}", variant).replace("{more}", more)


@pytest.mark.parametrize("op, variant, reason", UNKNOWN)
def test_a_kernel_for_an_unknown_op_or_variant_is_left_out_alone(install, op, variant, reason):
    install("newer-plugin", plugin(op, variant))
    registry = discover({})
    record = registry.plugin("newer-plugin")
    assert record.healthy and registry.find("rms_norm", "standard", "kept")
    assert [str(skipped) for skipped in record.skipped] == [f"kernel {op}/{variant}:other: {reason}"]


DEVICE_TYPES = [
    ("cudaa", "cuda"),
    ("CUDA", "cuda"),
    ("far_acm", "far_acme"),
    ("far_acme", ""),
    ("xpu", ""),
    ("tpu9", ""),
]


@pytest.mark.parametrize("kind, nearest", DEVICE_TYPES)
def test_a_kernel_for_a_misspelt_device_type_is_left_out_alone(install, kind, nearest):
    device = "\n@hookimpl\ndef veomni_devices():\n    return [DeviceSpec('far_acme', 'm:detect')]\n"
    install("far-device", "from veomni_core import DeviceSpec, hookimpl\nVEOMNI_PLUGIN_API_VERSION = 1" + device)
    needs = f", HardwareRequirement('cuda') | HardwareRequirement('{kind}')"
    install("user-plugin", plugin(more=needs).replace("import ", "import HardwareRequirement, ", 1))
    registry = discover({})
    said = [skipped.reason for skipped in registry.plugin("user-plugin").skipped]
    assert said == ([f"device type '{kind}' is unknown. Did you mean '{nearest}'?"] if nearest else [])
    assert registry.find("rms_norm", "standard", "kept")


def test_naming_a_kernel_of_a_misspelt_op_gives_its_reason(install):
    install("newer-plugin", plugin("rms_nrm"))
    with pytest.raises(
        UnknownNameError, match=r"'other' is unknown.*Left out: .*op 'rms_nrm' is unknown. Did you mean"
    ):
        OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": "other"}, discover({}))


def test_naming_a_kernel_that_was_left_out_gives_its_reason(install):
    install("newer-plugin", plugin(variant="ofset"))
    config = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": "other"}, discover({}))
    sites = (Site("rms_norm", "norm", "norm modules", "standard", ""),)
    message = r"other is provided by newer-plugin 1\.0, but left out: rms_norm has no variant 'ofset'"
    with pytest.raises(KernelUnavailableError, match=message):
        plan_sites(sites, config, hardware="cpu")


@pytest.mark.parametrize("op, variant, reason", UNKNOWN)
def test_strict_raises_for_a_kernel_that_would_be_left_out(install, op, variant, reason):
    install("newer-plugin", plugin(op, variant))
    with pytest.raises(PluginLoadError) as caught:
        discover({"VEOMNI_PLUGINS_STRICT": "1"})
    assert "plugin newer-plugin of newer-plugin 1.0 failed to load" in str(caught.value) and reason in str(caught.value)


def test_a_kernel_of_an_op_that_a_failed_plugin_defines_is_left_out_with_that_reason(install):
    op = "OpSpec(name='new_op', variants=('a',), config_field={field!r}, contract='m:C')"
    describe = "\n@hookimpl\ndef veomni_ops():\n    return [" + op + "]\n"
    head = "from veomni_core import OpSpec, hookimpl\nVEOMNI_PLUGIN_API_VERSION = 1\n"
    install("op-plugin", head + describe.format(field="rms_norm_implementation"))
    install("user-plugin", plugin("new_op", "a"))
    (skipped,) = discover({}).plugin("user-plugin").skipped
    assert "op 'new_op' is defined by op-plugin 1.0, which failed: config field" in skipped.reason


# Aliases: rms_norm's variant "offset" is documented as "qwen3_5" too.


class OffsetNorm(nn.Module):
    """Modeling code that declares its slot by the alias."""

    slot = OpSlot("rms_norm", "qwen3_5")

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.slot(x, self.weight, 1e-6) if self.slot.use_non_eager_impl else offset(x, self.weight, 1e-6)


def test_a_slot_declared_by_an_alias_is_found_planned_verified_and_bound():
    registry = counting_registry("one", ops=("rms_norm",))
    model, x = nn.Sequential(OffsetNorm()), torch.randn(3, 8)
    eager = model(x)
    assert [site.variant for site in find_sites(model, registry)] == ["offset"]
    binding = bind(model, {"preset": "eager", "rms_norm_implementation": "one"}, registry=registry, verify=True)
    calls.clear()
    torch.testing.assert_close(model(x), eager)
    assert calls == {("rms_norm", "offset", "one"): 1}
    assert json.loads(binding.plan.to_json())["kernels"][0]["spec"]["variant"] == "offset"


def test_sites_given_by_an_alias_are_planned():
    registry = counting_registry("one", ops=("rms_norm",))
    sites = (Site("rms_norm", "norm", "op slots", "qwen3_5", "declared"),)
    plan = plan_sites(sites, {"preset": "auto"}, registry=registry, hardware="cpu")
    (norm,) = [op for op in plan.ops if op.sites]
    assert norm.chosen == ("one",) and norm.sites[0].site.variant == "offset"


def test_a_spec_written_by_an_alias_is_the_canonical_kernel(install):
    install("alias-plugin", plugin(variant="qwen3_5"))
    registry = discover({})
    by_alias, canonical = (registry.resolve("rms_norm", variant, "other") for variant in ("qwen3_5", "offset"))
    assert by_alias is canonical and canonical.variant == "offset"
    assert registry.plugin_of(canonical).name == "alias-plugin"
    sites = (Site("rms_norm", "norm", "norm modules", "offset", ""),)
    ask = {"preset": "eager", "rms_norm_implementation": "other"}
    plan = plan_sites(sites, ask, registry=registry, hardware="cpu")
    assert [kernel.spec.key for kernel in plan.kernels] == [("rms_norm", "offset", "other")]


def test_a_spec_written_by_an_alias_passes_its_contract():
    spec = KernelSpec("reference", "rms_norm", "qwen3_5", "veomni_ops.rms_norm:offset", dtypes=("float32",))
    assert check_kernel(spec, "cpu", "float32").ok


def test_two_plugins_that_name_one_variant_differently_claim_one_kernel(install):
    install("plugin-a", plugin(variant="qwen3_5"))
    install("plugin-b", plugin(variant="offset").replace('"kept"', '"kept_b"'))
    assert discover({}).conflicts == {("rms_norm", "offset", "other"): ("plugin-a 1.0", "plugin-b 1.0")}


def test_positional_arguments_of_an_op_are_taken_with_a_warning():
    with pytest.warns(FutureWarning, match="OpSpec takes its arguments by keyword"):
        op = OpSpec("new_op", ("a",), "new_op_implementation", contract="m:C")
    assert op == OpSpec(name="new_op", variants=("a",), config_field="new_op_implementation", contract="m:C")


def test_a_spec_of_a_plugins_own_class_is_checked_too():
    own = type("OwnSpec", (KernelSpec,), {"__module__": __name__})
    with pytest.raises(SpecError, match="suspicions must be a Suspicion, not 'hopper'"):
        own("acme", "rms_norm", "standard", "acme:kernel", suspicions=("hopper",))
