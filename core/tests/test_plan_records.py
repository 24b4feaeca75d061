"""A plan as a record: its JSON, hash, difference, table and assumptions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planned_norms import NORMS, UNPROVEN, kernel, plan, registry
from veomni_conformance.given_kernels import definitions
from veomni_core import Hardware, HardwareRequirement, Plan
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import KernelUnavailableError


def test_a_plan_that_lacks_a_kernel_of_its_sites_is_not_read():
    data = {**json.loads(plan("torch").to_json()), "kernels": []}
    with pytest.raises(ValueError, match=r"torch at layers\.0\.norm is not among the plan's kernels"):
        Plan.from_json(json.dumps(data))


def test_a_plan_that_an_earlier_version_wrote_is_read():
    data = json.loads(plan("torch").to_json())
    for op in data["ops"]:
        del op["preset"]
        for site in op["sites"]:
            del site["glob"]
    assert Plan.from_json(json.dumps(data)).sha256 == plan("torch").sha256


def test_named_hardware_lists_package_requirements_as_assumptions():
    needy = registry(kernel("needy", hardware=HardwareRequirement("cuda", packages=("flash-attn>=3",))))
    assert plan("needy", sites=NORMS[:2], registry=needy).assumptions == ("rms_norm/standard:needy: flash-attn>=3",)
    table = plan("needy", sites=NORMS[:2], hardware="h200", registry=needy).table()
    assert table.endswith(
        "assumed of cuda 9.0 (NVIDIA H200), since it is not this machine:\n  rms_norm/standard:needy: flash-attn>=3"
    )
    assert "assumed" not in plan("eager", registry=needy).table()
    here = Hardware("cuda", 90, "NVIDIA H200", detected=True)
    with pytest.raises(KernelUnavailableError, match="needs flash-attn>=3, which is not installed"):
        plan("needy", sites=NORMS[:2], registry=needy, hardware=here)


def test_the_hash_speaks_of_what_runs_where_only():
    assert plan("liger_kernel").sha256 == plan("liger_kernel", hardware="b200").sha256
    assert plan("liger_kernel").sha256 == plan(["quack", "liger_kernel"]).sha256
    assert plan("liger_kernel").sha256 != plan("torch").sha256


def test_the_hash_speaks_of_what_a_model_is_set_to_where_it_is_left_as_it_is():
    """A site without a kernel runs the model's own setting, unless its eager code was asked for."""
    left, other = ((replace(UNPROVEN, own=own),) for own in ("sdpa", "flex_attention"))
    assert plan("auto", sites=left).sha256 != plan("auto", sites=other).sha256
    assert plan("eager", sites=left).sha256 == plan("eager", sites=other).sha256


def test_json_restores_the_plan():
    result = plan({"layers.0.*": ["quack", "torch"], "default": "auto"})
    again = Plan.from_json(result.to_json())
    assert (again.to_json(), again.sha256) == (result.to_json(), result.sha256)
    assert result.diff(again) == ()


def test_diff_says_what_runs_differently():
    assert plan("liger_kernel").diff(plan("torch")) == (
        "rms_norm: liger_kernel -> torch at 3 site(s): layers.0.norm, layers.1.norm, layers.2.norm",
    )
    newer = build_registry([*definitions(), PluginRecord("p", "veomni-p", "2.0", "p", kernels=(kernel("torch"),))], {})
    (sentence,) = plan("torch", sites=NORMS[:2]).diff(plan("torch", sites=NORMS[:2], registry=newer))
    assert sentence == "rms_norm/standard:torch: m:f of veomni-p 1.2 -> m:f of veomni-p 2.0"


def test_the_table_shows_what_was_asked_what_runs_and_why():
    table = plan("quack", hardware="h200").table()
    assert "preset eager, sha256" in table and "(preset)" not in table
    for words in ("rms_norm_implementation", "standard", "quack covers standard, not", "NVIDIA H200"):
        assert words in table


def test_what_the_model_has_no_site_for_is_counted_and_listed_on_request():
    alone = plan("quack", hardware="h200")
    hidden = [op.config_field for op in alone.ops if not op.sites and not op.written]
    assert hidden and f"no site for {len(hidden)} other ops; --all lists them" in alone.table()
    assert [field for field in hidden if field in alone.table()] == []
    everything = alone.table(everything=True)
    assert [field for field in hidden if field not in everything] == [] and "(preset)" in everything
    written = replace(alone, ops=tuple(replace(op, preset=None) for op in alone.ops)).table()
    assert [field for field in hidden if field not in written] == [], "a field that the job writes is always shown"


def test_kernels_for_other_devices_are_no_reason():
    far = registry(kernel("far", hardware=HardwareRequirement("cuda")), kernel("near", dtypes=("float16",)))
    (reason,) = {site.reason for op in plan("auto", NORMS[:2], registry=far, hardware="cpu").ops for site in op.sites}
    assert "near computes float16" in reason and "far" not in reason
    only = registry(kernel("far", hardware=HardwareRequirement("cuda")))
    (reason,) = {site.reason for op in plan("auto", NORMS[:2], registry=only, hardware="cpu").ops for site in op.sites}
    assert reason == "no kernel for a CPU is installed"


def test_of_alternative_requirements_the_packages_for_the_named_hardware_are_assumed():
    either = HardwareRequirement("cuda", packages=("cuda-lib",)) | HardwareRequirement("rocm", packages=("hip-lib",))
    both = registry(kernel("acme", hardware=either))
    for hardware, package in (("h200", "cuda-lib"), ("mi300x", "hip-lib")):
        result = plan("acme", NORMS[:1], hardware=hardware, registry=both)
        assert result.assumptions == (f"rms_norm/standard:acme: {package}",)
        assert Plan.from_json(result.to_json()) == result
