"""The sites of each family: all are found, on any device, and each one's variant is proven."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, T5Config, T5ForConditionalGeneration

from counting_kernels import counting_registry
from models import FAMILIES, build
from veomni_core import find_sites
from veomni_core.errors import BindingError

REGISTRY = counting_registry("one")
EXPECTED_VARIANTS = {
    "llama": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "qwen2": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "qwen3": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "qwen3_moe": {"rms_norm": "standard", "rotary_pos_emb": "full", "moe_experts": "standard"},
    "mixtral": {"rms_norm": "standard", "rotary_pos_emb": "full", "moe_experts": "standard"},
    "deepseek_v3": {"rms_norm": "standard", "rotary_pos_emb": "deinterleaved", "moe_experts": "standard"},
    "seed_oss": {"rms_norm": "standard", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
    "gemma3_text": {"rms_norm": "offset", "rotary_pos_emb": "full", "swiglu_mlp": "gelu_tanh"},
    "olmo2": {"rms_norm": "cast_after", "rotary_pos_emb": "full", "swiglu_mlp": "standard"},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_site_is_found_and_its_variant_proven(family, device):
    with torch.device(device):
        model = build(family)
    found = {}
    for site in find_sites(model, REGISTRY):
        found.setdefault(site.op_name, set()).add(site.variant)
    for op, variant in EXPECTED_VARIANTS[family].items():
        assert found[op] == {variant}, op
    assert found["cross_entropy_loss"] == {"causal"} and found["attention"] == {"standard"}
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    assert len([site for site in find_sites(model, REGISTRY) if site.op_name == "rms_norm"]) == len(norms)


@pytest.mark.parametrize(
    "family, needs",
    [
        ("llama", ()),
        ("gpt_oss", ("sinks",)),
        ("gemma2", ("softcap",)),
        ("deepseek_v32", ("chosen_keys", "dense_mask")),
        ("minimax_m3_vl_text", ("chosen_keys", "dense_mask")),
    ],
)
def test_what_attention_asks_of_a_kernel_is_read_from_the_model(family, needs):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    with torch.device("meta"):
        model = build(family)
    (site,) = [site for site in find_sites(model, REGISTRY) if site.op_name == "attention"]
    assert site.needs == needs


def test_a_bias_that_attention_is_handed_is_a_need():
    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=8)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    sites = [site for site in find_sites(model, REGISTRY) if site.op_name == "attention"]
    if not sites:
        pytest.skip("this transformers' T5 computes its attention itself")
    assert {site.needs for site in sites} == {("position_bias", "dense_mask")}


def test_what_is_no_model_is_refused():
    with pytest.raises(BindingError, match=r"needs a torch.nn.Module, not a dict"):
        find_sites({}, REGISTRY)


def test_finding_sites_asks_nothing_of_the_process_and_leaves_it_as_it_was():
    model = build("qwen3_moe")
    wanted = find_sites(model, REGISTRY)
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    with torch.no_grad(), torch.device("meta"):
        assert find_sites(model, REGISTRY) == wanted
    assert torch.equal(torch.random.get_rng_state(), state)
