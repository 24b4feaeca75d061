"""The masks that an attention kernel takes: one of transformers' kinds, which its spec declares, or its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models import build, tokens
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, bind
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_core.errors import KernelLoadError
from veomni_flash_attn import plugin as flash_attn
from veomni_npu import plugin as npu
from veomni_ops.attention import MASK_FEATURES, standard
from veomni_torch import plugin as torch_native

SPECS = [
    spec
    for plugin in (flash_attn, npu, torch_native)
    for spec in plugin.veomni_kernels()
    if (spec.op_name, spec.variant) == ("attention", "standard") and not spec.mask
]
seen: list[torch.Tensor] = []


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_spec_declares_one_kind(spec):
    assert len(set(spec.features) & set(MASK_FEATURES.values())) == 1


def hidden_pairs(*args, **kwargs):
    """A mask that is true where a query does not see a key, as NPUs' operators want it."""
    kept = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return ~kept


def by_hidden_pairs(module, query, key, value, attention_mask, **options):
    seen.append(attention_mask)
    return standard(module, query, key, value, ~attention_mask, **options)


OWN = KernelSpec(
    name="acme",
    op_name="attention",
    variant="standard",
    factory=f"{__name__}:by_hidden_pairs",
    features=("dense_mask",),
    mask=f"{__name__}:hidden_pairs",
)


def registry(spec):
    return build_registry([*definitions(), PluginRecord("acme", "veomni-acme", "1", "acme", kernels=(spec,))], {})


def test_a_kernel_brings_the_function_that_builds_its_masks():
    config = {"preset": "eager", "attn_implementation": "acme"}
    ids, padding = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    padding[1, 9:] = 0
    own, model = build("llama"), build("llama")
    wanted = own(ids, attention_mask=padding).logits
    before = [set(table.valid_keys()) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    with bind(model, config, registry=registry(OWN)):
        seen.clear()  # bind calls a stranger's kernel once
        found = model(ids, attention_mask=padding).logits
    torch.testing.assert_close(found[padding.bool()], wanted[padding.bool()], rtol=1e-5, atol=1e-5)
    assert all(mask.dtype == torch.bool and bool(mask[1, 0, 5, 6]) and not bool(mask[1, 0, 6, 5]) for mask in seen)
    assert len(seen) == model.config.num_hidden_layers
    assert before == [set(table.valid_keys()) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    torch.testing.assert_close(model(ids, attention_mask=padding).logits, wanted)


def test_one_function_with_two_kinds_of_masks_is_two_kernels():
    other = dataclasses.replace(OWN, factory="transformers.integrations.sdpa_attention:sdpa_attention_forward", mask="")
    inverted = dataclasses.replace(other, mask=f"{__name__}:hidden_pairs")
    ids, config = tokens(2, 12), {"preset": "eager", "attn_implementation": "acme"}
    plain, model = build("llama"), build("llama")
    with bind(plain, config, registry=registry(other)), bind(model, config, registry=registry(inverted)):
        assert plain.config._attn_implementation == "sdpa" != model.config._attn_implementation
        assert not torch.allclose(plain(ids).logits, model(ids).logits)  # sdpa sees what is hidden


@pytest.mark.parametrize(
    ("mask", "why"), [("nowhere:mask", "ModuleNotFoundError"), (f"{__name__}:SPECS", "gave a list")]
)
def test_a_mask_that_can_not_be_loaded_leaves_the_model_as_it_was(mask, why):
    model, broken = build("llama"), dataclasses.replace(OWN, mask=mask)
    with pytest.raises(KernelLoadError, match=why):
        bind(model, {"preset": "eager", "attn_implementation": "acme"}, registry=registry(broken))
    assert model.config._attn_implementation == build("llama").config._attn_implementation
