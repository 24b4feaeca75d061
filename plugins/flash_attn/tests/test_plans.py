"""What the plugin declares: which kernel a plan takes on which hardware, and what is refused before a call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from flash_plugin import NAMES, SPECS, registry, without_gpu
from transformers import T5Config, T5ForConditionalGeneration

from models import build
from veomni_conformance import check_kernel
from veomni_core import Hardware, OpsConfig, find_sites, plan_sites
from veomni_core.errors import KernelLoadError, KernelUnavailableError, SpecError


def plan(family, kernel, ours=None, hardware="h200", dtype=torch.bfloat16, autocast=None, **config):
    ours = ours or registry()
    ops = OpsConfig.from_dict({"preset": "eager", "attn_implementation": kernel}, ours)
    with torch.device("meta"):
        model = build(family, dtype=dtype, **config)
    sites, target = find_sites(model, ours), ours.named_hardware(hardware)
    return plan_sites(sites, ops, hardware=target, registry=ours, autocast=autocast)


@pytest.mark.parametrize("kernel", [*NAMES, "flex_attention"])
def test_an_h200_plans_each_by_the_name_of_the_seeds(kernel):
    found = plan("llama", kernel, head_dim=64)
    assert found.ops[0].chosen == (kernel,)
    assert found.from_json(found.to_json()) == found


@pytest.mark.parametrize("kernel", NAMES)
def test_float32_weights_have_them_under_autocast_alone(kernel):
    with pytest.raises(KernelUnavailableError, match=r"this site is float32 \(if it trains under autocast, say so"):
        plan("llama", kernel, dtype=torch.float32)
    (site,) = plan("llama", kernel, dtype=torch.float32, autocast="bfloat16").ops[0].sites
    assert (site.kernel, site.dtypes) == (kernel, ("bfloat16",))


@pytest.mark.parametrize(
    ("hardware", "fastest"),
    [("h200", "flash_attention_3"), ("b200", "flash_attention_4"), ("a100", "flash_attention_2")],
)
def test_auto_takes_the_fastest_that_runs(hardware, fastest):
    assert plan("llama", "auto", hardware=hardware).ops[0].chosen == (fastest,)


@pytest.mark.parametrize(
    ("kernel", "hardware", "reason"),
    [
        ("flash_attention_4", "a100", "needs compute capability >= 9.0, this GPU is 8.0"),
        ("flash_attention_3", "b200", "needs compute capability <= 9.0, this GPU is 10.0"),
        ("flash_attention_2", "cpu", "needs device type cuda"),
    ],
)
def test_other_hardware_is_refused_with_the_reason(kernel, hardware, reason):
    with pytest.raises(KernelUnavailableError, match=reason):
        plan("llama", kernel, hardware=hardware)


@pytest.mark.parametrize(
    ("family", "kernel", "config", "reason"),
    [
        ("gpt_oss", "flash_attention_2", {}, "does not compute sinks"),
        ("llama", "flash_attention_4", {"attention_dropout": 0.1}, "does not compute dropout"),
        ("llama", "flex_attention", {"attention_dropout": 0.1}, "does not compute dropout"),
    ],
)
def test_what_the_model_asks_for_in_every_call_is_refused_before_a_weight_is_loaded(family, kernel, config, reason):
    with pytest.raises(KernelUnavailableError, match=reason):
        plan(family, kernel, **config)
    plan(family, "flash_attention_2" if "dropout" in reason else "flash_attention_4", **config)


@pytest.mark.parametrize(
    ("kernel", "config", "reason"),
    [
        *((name, {"head_dim": 20}, "takes heads of 8 to .* in multiples of 8, this site has 20") for name in NAMES),
        ("flash_attention_4", {"head_dim": 256}, "takes heads of 8 to 192 in multiples of 8, this site has 256"),
        ("flash_attention_3", {"head_dim": 264}, "in multiples of 8, this site has 264"),
        ("flex_attention", {"head_dim": 8}, "takes heads of at least 16, this site has 8"),
    ],
)
def test_heads_that_a_library_does_not_take_are_refused_when_planning(kernel, config, reason):
    with pytest.raises(KernelUnavailableError, match=reason):
        plan("llama", kernel, **config)
    assert kernel not in plan("llama", "auto", **config).ops[0].chosen


def test_values_of_another_width_count_as_well():
    with pytest.raises(KernelUnavailableError, match="in multiples of 8, this site has 12"):
        plan("deepseek_v3", "flash_attention_3", v_head_dim=12)


def test_float32_heads_of_20_are_planned_for_no_flash_attention():
    assert not {*NAMES} & {*plan("llama", "auto", dtype=torch.float32, head_dim=20, hardware="h100").ops[0].chosen}


def test_a_model_that_transformers_gives_no_flash_attention_is_given_none_here():
    with torch.device("meta"):
        model = T5ForConditionalGeneration(
            T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=8)
        )
    ours = registry()
    ops = OpsConfig.from_dict({"preset": "eager", "attn_implementation": "flash_attention_3"}, ours)
    with pytest.raises(KernelUnavailableError, match="does not compute dense_mask, which this site needs"):
        plan_sites(find_sites(model, ours), ops, hardware=ours.named_hardware("h200"), registry=ours)


def test_two_packages_that_claim_one_kernel_are_refused_both():
    claimed = {SPECS["flash_attention_2"].key: ("rival-attention 1.0", "veomni-flash-attn 0.1.0")}
    with pytest.raises(KernelUnavailableError, match=r"claimed by rival-attention 1.0 and veomni-flash-attn 0.1.0"):
        plan("llama", "flash_attention_2", registry(conflicts=claimed))


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch):
    here = Hardware("cuda", 90, "NVIDIA H200", detected=True)
    monkeypatch.setattr("veomni_core.descriptions.hardware._installed_version", {"flash-attn": "1.0.9"}.get)
    assert SPECS["flash_attention_2"].hardware.unmet(here) == ("needs flash-attn>=2.7,<3, 1.0.9 is installed",)
    (missing,) = SPECS["flash_attention_4"].hardware.unmet(here)
    assert missing == "needs flash-attn-4>=4.0.0b13,<4.1, which is not installed"


@without_gpu
def test_a_package_that_can_not_be_imported_is_named():
    before = sys.modules.pop("veomni_flash_attn.flash_attention_2", None)
    try:
        with pytest.raises(KernelLoadError, match="veomni_flash_attn.flash_attention_2:standard failed: .*flash_attn"):
            SPECS["flash_attention_2"].load()
    finally:
        if before is not None:
            sys.modules["veomni_flash_attn.flash_attention_2"] = before


def test_float32_is_not_declared_by_the_libraries():
    with pytest.raises(SpecError, match="does not declare float32"):
        check_kernel(SPECS["flash_attention_4"], "cpu", "float32")


def test_describing_them_imports_neither_torch_nor_a_library():
    code = """
import sys, veomni_flash_attn.plugin as plugin
plugin.veomni_kernels()
sys.exit("torch" in sys.modules or "flash_attn" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_helpers_of_sequence_parallelism_have_their_names_here_too():
    from veomni_flash_attn import sequence_parallel
    from veomni_transformers import sequence as home

    assert all(getattr(sequence_parallel, name) is getattr(home, name) for name in sequence_parallel.__all__)


def test_a_plan_says_what_padding_gives():
    """What FlashAttention gives at padding is not compared with the model's own, unless that is FlashAttention too."""
    zeros = "queries at padding that see keys give zeros, unlike sdpa's: no loss may count them"
    assert f"attention:flash_attention_3 (1): {zeros}" in plan("llama", "flash_attention_3", head_dim=64).table()
    for own, unlike in (("eager", "unlike eager's"), ("sdpa", "unlike sdpa's")):
        (site,) = plan("llama", "flash_attention_2", head_dim=64, attn_implementation=own).ops[0].sites
        assert len(site.left_out) == 1 and unlike in site.left_out[0]
    (site,) = plan("llama", "flex_attention", head_dim=64, attn_implementation="eager").ops[0].sites
    assert site.left_out[0].startswith("queries that see no key give zeros, and eager's a mean of values")
    (site,) = plan("llama", "flex_attention", head_dim=64).ops[0].sites
    assert not site.left_out
