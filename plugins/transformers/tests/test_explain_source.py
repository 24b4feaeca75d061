"""``veomni explain MODEL --source PATH`` prints the code that runs, and how it differs from transformers' own."""

from __future__ import annotations

import pytest

from models import build
from veomni_core import bind, binding_of
from veomni_core.errors import ConfigError
from veomni_tools.cli.explain import explain
from veomni_transformers.cli.source import said


def lines(model, path):
    return "\n".join(said(model.get_submodule(path), path, binding_of(model).plan))


def test_a_bound_norm_is_shown_with_its_kernel_and_the_difference():
    model = build("llama")
    bind(model, {"preset": "eager", "rms_norm_implementation": "torch"})
    shown = lines(model, "model.norm")
    assert "rms_norm/standard: torch" in shown and "#   kernel is veomni_torch.rms_norm.standard" in shown
    assert "+    return kernel(hidden_states, self.weight, +eps)" in shown
    assert "-    variance = hidden_states.pow(2).mean(-1, keepdim=True)" in shown
    untouched = lines(model, "model.layers.0.mlp")
    assert "swiglu_mlp/standard: eager" in untouched and "none: the code is transformers' own" in untouched


@pytest.mark.thorough
def test_the_command_finds_the_module_or_the_nearest(capsys):
    explain("qwen3_moe", source="model.layers.0.mlp.experts")
    printed = capsys.readouterr().out
    assert "moe_experts/standard: grouped_mm" in printed and "veomni_torch.moe_experts.standard, line" in printed
    with pytest.raises(ConfigError, match=r"has no module model\.nrm. Did you mean 'model.norm'"):
        explain("qwen3_moe", source="model.nrm")
    with pytest.raises(ConfigError, match="prints code, not JSON"):
        explain("qwen3_moe", source="model.norm", json=True)
