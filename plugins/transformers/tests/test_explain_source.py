"""``veomni explain MODEL --source PATH`` prints the code that runs, and how it differs from transformers' own."""

from __future__ import annotations

import pytest

from counting_kernels import counting_registry
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


KINDS = {
    "rms_norm": ("model.layers.1.input_layernorm", "+#   kernel is counting_kernels."),
    "rotary_pos_emb": ("model.layers.1.self_attn", "+#   apply_rotary_pos_emb_interleave is counting_kernels."),
    "swiglu_mlp": ("model.layers.0.mlp", "+#   bound is veomni_transformers.forwards.gated_mlps."),
    "moe": ("model.layers.1.mlp.experts", "+#   bound is veomni_transformers.forwards.adapted_experts."),
    "cross_entropy_loss": ("", "+#   original is transformers.models.deepseek_v3.modeling_deepseek_v3."),
}


@pytest.mark.parametrize("field", KINDS)
def test_each_kind_of_site_is_shown_with_what_runs_there_and_the_difference(field):
    path, difference = KINDS[field]
    model = build("deepseek_v3")
    bind(model, {"preset": "eager", f"{field}_implementation": "one"}, registry=counting_registry("one"))
    shown = lines(model, path)
    ran, _, changed = shown.partition("\nThe difference from transformers.models.deepseek_v3.")
    assert ": one" in ran and difference in changed
    for other, _ in KINDS.values():
        if other not in ("", path) and "experts" not in other:  # which are eager in place of transformers' choice
            assert lines(model, other).endswith("none: the code is transformers' own"), other


def test_the_attention_of_a_module_is_named_where_the_model_chooses_it():
    model = build("llama")
    bind(model, {"preset": "eager", "attn_implementation": "sdpa"})
    shown = lines(model, "model.layers.0.self_attn")
    assert "+#   the attention is veomni_torch.attention.sdpa" in shown
    assert "-#   the attention is transformers.models.llama.modeling_llama.eager_attention_forward" in shown


def test_decorators_of_transformers_are_no_difference():
    model = build("qwen3_next")
    bind(model, {"preset": "eager"})
    assert lines(model, "model.layers.0.linear_attn").endswith("none: the code is transformers' own")


@pytest.mark.thorough
def test_the_command_finds_the_module_or_the_nearest(capsys):
    explain("qwen3_moe", source="model.layers.0.mlp.experts")
    printed = capsys.readouterr().out
    assert "moe_experts/standard: grouped_mm" in printed and "veomni_torch.moe_experts.standard, line" in printed
    with pytest.raises(ConfigError, match=r"has no module model\.nrm. Did you mean 'model.norm'"):
        explain("qwen3_moe", source="model.nrm")
    with pytest.raises(ConfigError, match=r"has no module nope\. Known: lm_head, model, "):
        explain("qwen3_moe", source="nope")
    with pytest.raises(ConfigError, match="prints code, not JSON"):
        explain("qwen3_moe", source="model.norm", json=True)
