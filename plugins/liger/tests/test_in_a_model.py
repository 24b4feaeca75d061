"""Liger's kernels bound to real models: the same step as eager, which Liger's own patch of some models doesn't give."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models import build, step, tokens
from veomni_conformance.given_kernels import definitions
from veomni_core import HardwareRequirement, bind
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_liger.plugin import veomni_kernels

ROOT = Path(__file__).resolve().parents[3]
NORM, ROTARY, MLP, LOSS, EXPERTS = FIELDS = (
    "rms_norm_implementation",
    "rotary_pos_emb_implementation",
    "swiglu_mlp_implementation",
    "cross_entropy_loss_implementation",
    "moe_implementation",
)


def registry():
    """The plugin's kernels alone, usable in the interpreter, which is no GPU."""
    kernels = tuple(replace(spec, hardware=HardwareRequirement()) for spec in veomni_kernels())
    record = PluginRecord("liger", "veomni-liger", "0", "veomni_liger.plugin", kernels=kernels)
    return build_registry([*definitions(), record], {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds float32 products otherwise than the interpreter")
@pytest.mark.parametrize(
    "model_type, variants",
    [
        ("llama", {NORM: "standard", ROTARY: "full", MLP: "standard", LOSS: "causal"}),
        ("olmo2", {NORM: "cast_after", ROTARY: "full", MLP: "standard", LOSS: "causal"}),
        ("gemma3_text", {NORM: "offset", ROTARY: "full", MLP: "gelu_tanh", LOSS: "causal"}),
        ("gpt_oss", {NORM: "cast_after", ROTARY: "half_width", LOSS: "causal"}),
        ("qwen3_moe", {EXPERTS: "standard"}),
    ],
)
def test_a_step_is_as_eager(model_type, variants):
    # The experts take 16 bits alone; bfloat16 rounds by 2^-9.
    dtype, near = (torch.bfloat16, 2e-2) if EXPERTS in variants else (torch.float32, 1e-4)
    model = build(model_type, dtype=dtype, num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2)
    ids = tokens(2, 5)
    wanted, wanted_gradients = step(model, ids)
    fields = {field: "fused_liger" if field == EXPERTS else "liger_kernel" for field in variants}
    with bind(model, {"preset": "eager", **fields}, registry=registry()) as binding:
        found, gradients = step(model, ids)
    for decision in binding.plan.ops:
        if decision.config_field in variants:
            assert {site.site.variant for site in decision.sites} == {variants[decision.config_field]}
            assert not decision.left_eager
    torch.testing.assert_close(found, wanted, rtol=near / 10, atol=1e-6)
    for name, gradient in wanted_gradients.items():
        assert (gradients[name] - gradient).norm() <= near * gradient.norm() + 1e-7, name


@pytest.mark.gpu
def test_in_bf16_norms_round_as_eager_where_liger_s_own_patch_does_not(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "whole_models" / "liger_against_its_own_patch.py"), "--json"]
    subprocess.run([*command, str(tmp_path / "found.json")], check=True)
    models = json.loads((tmp_path / "found.json").read_text())["models"]
    assert models.keys() == {"olmo2", "gpt_oss", "gemma3_text"}
    for name, found in models.items():
        assert found["bound"]["norm elements"] <= 0.03, name
        # Another order of summation: no further from exact than eager is, up to a quarter.
        assert found["bound"]["gradients from float32"] <= 1.25 * found["eager"]["gradients from float32"], name
    for name in ("olmo2", "gpt_oss"):
        assert models[name]["patched"]["norm elements"] > 0.03, name
