"""Bound models of images, video and audio compute the losses and gradients of their own code."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_multimodal import media_batch, text_batch, tiny_model, with_kinds

from veomni_core import bind

IMAGES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "gemma3", "paligemma", "llava", "llava_next"]
IMAGES += ["internvl", "mistral3", "idefics3", "llama4", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]
VIDEOS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_omni_moe_thinker"]
CASES = [
    *((each, "text") for each in (*IMAGES, "qwen3_vl", "mllama", "qwen2_audio")),
    *((each, "image") for each in IMAGES),
    *((each, "video") for each in VIDEOS),
    *((each, "audio") for each in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")),
]


@pytest.mark.parametrize(
    "model_type, what",
    [("qwen3_vl", "image"), *(pytest.param(*case, marks=pytest.mark.thorough) for case in CASES)],
)
def test_bound_is_eager(model_type, what):
    model = tiny_model(model_type)
    batch = with_kinds(model_type, text_batch()) if what == "text" else media_batch(model, what)
    own = copy.deepcopy(model)
    with bind(model, {"preset": "auto"}) as binding:
        assert not binding.receipt.changed
        losses = [each(**batch).loss for each in (own, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for (name, mine), (_, wanted) in zip(model.named_parameters(), own.named_parameters(), strict=True):
            assert (mine.grad is None) == (wanted.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-3, atol=1e-5)
        assert not binding.receipt.changed
