"""Planning: pure, without torch, with every refusal explained."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planned_norms import MLP, NORMS, REGISTRY, UNPROVEN, chosen, kernel, plan, reasons, registry
from veomni_core import Hardware, OpsConfig, Plan, Site, make_plan, plan_sites
from veomni_core.errors import BindingError, ConfigError, KernelUnavailableError, NoSiteError
from veomni_core.planning import choice


def test_a_name_binds_every_site_that_it_covers():
    assert chosen(plan("liger_kernel")) == ["liger_kernel"] * 3


def test_a_site_whose_variant_the_kernel_does_not_cover_stays_eager_with_the_reason():
    result = plan("quack", hardware="h200")
    assert chosen(result) == ["quack", "quack", "eager"]
    assert reasons(result)[2] == "quack covers standard, not offset"


def test_a_kernel_that_cannot_run_is_refused_with_reason_and_alternatives():
    message = (
        r"rms_norm_implementation: quack can't run here: needs compute capability >= 9.0, "
        r"this GPU is 8.0 \(NVIDIA A100\)\. Usable: eager, half, liger_kernel, shy, torch\."
    )
    with pytest.raises(KernelUnavailableError, match=message):
        plan("quack")


def test_a_kernel_that_another_plugin_claims_for_one_variant_is_no_silent_choice():
    twice = replace(
        REGISTRY, _kernels=dict(REGISTRY._kernels), conflicts={("rms_norm", "standard", "torch"): ("a", "b")}
    )
    twice._kernels["rms_norm"] = tuple(
        each for each in REGISTRY.kernels("rms_norm") if str(each) != "rms_norm/standard:torch"
    )
    claimed = "torch for standard is claimed by a and b; block all but one of them with VEOMNI_PLUGINS_BLOCK"
    by_auto, by_name = (plan(value, hardware="cpu", registry=twice) for value in ("auto", "torch"))
    assert chosen(by_auto) == chosen(by_name) == ["eager", "eager", "torch"]
    assert reasons(by_auto)[0].endswith(f", after: {claimed}") and reasons(by_name)[0] == claimed


@pytest.mark.parametrize(
    "value, message",
    [
        ("triton", "triton is not installed: pip install veomni-triton. Usable: eager"),
        ("inference", "inference can't run here: has no backward, and training needs one"),
        ("half", "half covers none of the 3 sites: half computes float16, this site is bfloat16"),
        (["quack", "triton"], "quack can't run here: .*; triton is not installed: pip install veomni-triton"),
        ({"layers.0.*": "quack"}, r"rms_norm_implementation\['layers.0.\*'\]: quack can't run here"),
    ],
)
def test_an_explicit_choice_never_falls_back(value, message):
    with pytest.raises(KernelUnavailableError, match=message):
        plan(value)


def test_a_list_takes_the_first_that_can_run_and_says_what_it_passed_over():
    result = plan(["quack", "liger_kernel", "torch"])
    assert chosen(result) == ["liger_kernel"] * 3
    assert reasons(result)[0].startswith("as asked, after: quack needs compute capability >= 9.0")


def test_a_list_may_end_in_eager():
    assert chosen(plan(["quack", "eager"])) == ["eager"] * 3


@pytest.mark.parametrize(
    "hardware, expected",
    [("h200", ["quack", "quack", "liger_kernel"]), ("a100", ["liger_kernel"] * 3), ("cpu", ["torch"] * 3)],
)
def test_auto_takes_the_highest_preference_that_runs(hardware, expected):
    assert chosen(plan("auto", hardware=hardware)) == expected


def test_auto_never_takes_a_kernel_without_preference():
    result = plan("auto", registry=registry(kernel("shy", preference=0)))
    assert chosen(result) == ["eager"] * 3
    assert reasons(result)[0] == "shy is not preferred to the model's own code"
    assert chosen(plan("shy", registry=registry(kernel("shy", preference=0))))[0] == "shy"


def test_auto_takes_the_fastest_of_a_measured_profile():
    times = {"rms_norm": {"torch": 0.5, "liger_kernel": 0.7, "eager": 2.0}}
    assert chosen(plan("auto", profile=times)) == ["torch"] * 3
    assert reasons(plan("auto", profile=times))[0] == "the fastest measured, 0.5 ms"
    assert chosen(plan("auto", profile={"rms_norm": {"eager": 0.1, "torch": 0.5}})) == ["eager"] * 3


def test_globs_choose_per_module():
    result = plan({"layers.0.*": "torch", "default": "liger_kernel"})
    assert chosen(result) == ["torch", "liger_kernel", "liger_kernel"]


def test_a_decision_has_the_spec_of_its_kernel_and_the_glob_that_decided():
    result = plan({"layers.0.*": "torch", "layers.1.*": "eager", "default": "liger_kernel"})
    (norm,) = [op for op in result.ops if op.sites]
    first, second, third = norm.sites
    assert [decision.glob for decision in norm.sites] == ["layers.0.*", "layers.1.*", None]
    assert first.spec is REGISTRY.find("rms_norm", "standard", "torch")
    assert (second.spec, second.kernel) == (None, "eager")
    assert third.spec is REGISTRY.find("rms_norm", "offset", "liger_kernel")
    assert [planned.spec for planned in result.kernels] == [third.spec, first.spec]
    assert Plan.from_json(result.to_json()).ops == result.ops


def test_a_path_is_matched_with_each_glob_once(monkeypatch):
    matched = []
    monkeypatch.setattr(choice, "fnmatchcase", lambda path, glob: matched.append(path) or fnmatchcase(path, glob))
    plan({"layers.0.*": "torch", "default": "liger_kernel"})
    assert matched == [site.path for site in NORMS]


def test_sites_are_planned_by_plan_sites_and_models_by_make_plan():
    with pytest.raises(BindingError, match="make_plan needs a model; to plan for sites .* call plan_sites"):
        make_plan(NORMS, {"preset": "eager"})


def test_a_config_that_was_checked_against_another_registry_is_refused():
    config = OpsConfig.from_dict({"preset": "eager"}, REGISTRY)
    with pytest.raises(ConfigError, match="leave registry out"):
        plan_sites(NORMS, config, registry=registry())
    assert plan_sites(NORMS, config, registry=REGISTRY, hardware="cpu").ops


def test_a_glob_that_matches_nothing_is_an_error_that_names_paths():
    with pytest.raises(
        NoSiteError, match=r"\['encoder.\*'\]: no rms_norm site has such a path; sites are at layers.0.norm"
    ):
        plan({"encoder.*": "torch"})


def test_a_chosen_kernel_without_any_site_is_an_error():
    with pytest.raises(NoSiteError, match="torch was chosen, but the model has no rms_norm site; remove the field, w"):
        plan("torch", sites=(MLP,))


@pytest.mark.parametrize("allowed", [True, ["rms_norm_implementation"]])
def test_a_field_that_may_be_unused_is_a_warning_and_every_other_mistake_an_error(allowed, caplog):
    def planned(sites, **fields):
        config = {"preset": "eager", "rms_norm_implementation": "torch", "allow_unused": allowed, **fields}
        return plan_sites(sites, config, registry=REGISTRY, hardware="cpu")

    assert chosen(planned((MLP,))) == []
    (warned,) = caplog.messages
    assert warned.startswith("allow_unused: rms_norm_implementation: torch was chosen, but the model has no rms_norm")
    planned((MLP,), rms_norm_implementation={"layers.0.*": "torch", "default": "eager"})
    assert chosen(planned(NORMS)) == ["torch"] * 3
    with pytest.raises(NoSiteError, match="no rms_norm site has such a path"):
        planned(NORMS, rms_norm_implementation={"encoder.*": "torch"})
    with pytest.raises(KernelUnavailableError, match="needs device type cuda"):
        planned((MLP,), rms_norm_implementation="liger_kernel")
    with pytest.raises(NoSiteError, match="has no rms_norm site"):
        planned((MLP,), allow_unused=["moe_implementation"])


def test_what_only_the_preset_chose_needs_no_site():
    everything = registry(kernel("liger_kernel"), kernel("triton", op="load_balancing_loss"))
    config = OpsConfig.from_dict({"preset": "gpu"}, everything, environ={})
    assert chosen(plan_sites(NORMS[:2], config, hardware="h200")) == ["liger_kernel"] * 2


def test_an_unproven_site_stays_eager_with_what_was_tried():
    result = plan("torch", sites=(*NORMS, UNPROVEN))
    assert chosen(result) == ["torch"] * 3 + ["eager"]
    assert reasons(result)[3] == "not proven: standard: 30% of elements differ"
    with pytest.raises(KernelUnavailableError, match="covers none of the 1 sites: not proven: standard: 30%"):
        plan("torch", sites=(UNPROVEN,))


def test_the_gpu_preset_elsewhere_raises_once_for_all_fields_with_the_alternatives():
    sites = (*NORMS, MLP, Site("moe_experts", "layers.0.experts", "experts modules", "standard", "proven"))
    with pytest.raises(KernelUnavailableError) as raised:
        plan_sites(sites, OpsConfig.from_dict({"preset": "gpu"}, REGISTRY, environ={}), hardware="mi300x")
    lines = str(raised.value).splitlines()
    fields = {line.partition(":")[0] for line in lines}
    assert fields == {op.config_field for op in REGISTRY.ops.values() if op.default != "eager"}
    (norm,) = [line for line in lines if line.startswith("rms_norm_implementation")]
    assert "liger_kernel can't run here: needs device type cuda, this is rocm (AMD Instinct MI300X)" in norm
    assert norm.endswith("Usable: eager, half, shy, torch.")


def test_planning_for_named_hardware_list_and_new_plugin_import_neither_torch_nor_a_kernel_library(tmp_path):
    script = """
import sys
from veomni_core import OpsConfig, Site, discover, plan_sites
registry = discover({})
config = OpsConfig.from_dict({"preset": "eager"}, registry)
plan_sites((Site("rms_norm", "norm", "norm modules", "standard", "proven"),), config, hardware="h200").to_json()
heavy = {"torch", "transformers", "triton", "numpy", "liger_kernel", "flash_attn", "quack"} & set(sys.modules)
print(sorted(heavy))
from contextlib import redirect_stdout
from veomni_core.cli.app import build_app
with redirect_stdout(sys.stderr):
    build_app()(["list"], standalone_mode=False)
print(sorted({"torch", "transformers", "triton", "numpy", "pydantic"} & set(sys.modules)))
with redirect_stdout(sys.stderr):
    build_app()(["new-plugin", "acme", "--folder", "acme"], standalone_mode=False)
print(sorted({"torch", "transformers", "triton", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "[]"]
    assert "Ops" in done.stderr and (tmp_path / "acme" / "pyproject.toml").exists()


NAMES = st.sampled_from(["liger_kernel", "quack", "torch", "shy", "eager", "auto"])


@given(
    names=st.lists(NAMES, min_size=1, max_size=4),
    hardware=st.sampled_from(["cpu", "a100", "h200", "mi300x"]),
    order=st.permutations(range(4)),
)
def test_whatever_is_asked_only_kernels_that_can_run_are_chosen_and_the_order_of_sites_is_no_matter(
    names, hardware, order
):
    sites = (*NORMS, UNPROVEN)
    try:
        result = plan(names, sites, hardware)
    except KernelUnavailableError:
        return
    assert plan(names, [sites[i] for i in order], hardware).sha256 == result.sha256
    for op in result.ops:
        for decision in op.sites:
            if decision.bound:
                assert decision.spec.hardware.unmet(Hardware.named(hardware)) == ()
                assert decision.kernel in names or "auto" in names
