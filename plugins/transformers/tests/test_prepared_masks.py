"""Masks that a caller prepares keep packed sequences apart in decoders that build theirs without positions."""

from __future__ import annotations

import pytest
import torch

from models import build
from veomni_transformers.packed.prepared_masks import prepared_masks

LENGTH = 7


@pytest.mark.parametrize("family", ["gpt_oss", "opt", "biogpt"])
def test_packed_sequences_are_as_alone_and_without_these_masks_are_not(family):
    model = build(
        family, **{"ffn_dim": 48, "word_embed_proj_dim": 32, "num_experts_per_tok": 2, "num_local_experts": 4}
    )
    ids = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).repeat(2)[None]
    masks = prepared_masks(model, positions)
    packed = {"input_ids": ids.reshape(1, -1), "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        alone = model.eval()(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        apart, mixed = (model(**packed, **given).logits[0] for given in (masks, {}))
    torch.testing.assert_close(apart, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(mixed, alone, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_decoder_that_builds_masks_of_positions_needs_none(family):
    assert prepared_masks(build(family), torch.arange(LENGTH)[None]) == {}


@pytest.mark.parametrize("model_type", ["exaone_moe", "modernbert-decoder"])  # whose decoder is a part of its head
def test_a_module_that_calls_no_function_of_masks_gets_none(model_type):
    assert prepared_masks(build(model_type), torch.arange(LENGTH)[None]) == {}
