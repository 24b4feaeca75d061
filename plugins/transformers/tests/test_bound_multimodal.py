"""Bound models of images, video and sound give eager's loss and gradients, with their towers' attention bound too."""

from __future__ import annotations

import pytest
import torch
from tiny_multimodal import CONFIGS, media_batch, mixed_batch, text_batch, tiny_model, with_kinds

from planned_norms import vouching
from veomni_conformance.given_kernels import definitions
from veomni_core import KernelSpec, bind
from veomni_core.discovery.registry import PluginRecord, build_registry

OMNI = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
VIDEOS = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", *OMNI}
SOUNDS = {"qwen2_audio", *OMNI}
MIXED = {  # what stands in a row beside one of text; Mllama's have an image each, and GLM-4V's images or videos
    family: [kind for kind, families in (("video", VIDEOS - {"glm4v"}), ("audio", SOUNDS)) if family in families]
    for family in CONFIGS
    if family not in ("whisper", "mllama")
}
CASES = [
    (family, modality)
    for family in CONFIGS
    if family != "whisper"
    for modality in (
        "text",
        *([] if family == "qwen2_audio" else ["image"]),
        *(["video"] if family in VIDEOS else []),
        *(["audio"] if family in SOUNDS else []),
        *(["mixed"] if family in MIXED else []),
    )
]


def step(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "modality"),
    [
        pytest.param(*case, marks=[] if case == ("qwen2_5_vl", "image") else pytest.mark.thorough, id="-".join(case))
        for case in CASES
    ],
)
def test_bound_equals_eager(family, modality):
    model = tiny_model(family)
    model.train()
    if modality == "mixed":
        batch = mixed_batch(model, [*([] if family == "qwen2_audio" else ["image"]), *MIXED[family]])
    else:
        batch = with_kinds(family, text_batch()) if modality == "text" else media_batch(model, modality)
    wanted, gradients = step(model, batch)
    binding = bind(model, {"preset": "auto", "attn_implementation": "sdpa"})
    bound = [each for op in binding.plan.ops for each in op.sites if each.bound]
    assert {"attention", "cross_entropy_loss"} <= {
        op.op_name for op in binding.plan.ops if any(d.bound for d in op.sites)
    }
    loss, found = step(model, batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    assert found.keys() == gradients.keys() and bound
    # The loss of Qwen2-Audio takes the logits of what a mask leaves; the receipt says so.
    assert {*binding.receipt.changed} == ({"the loss"} if (family, modality) == ("qwen2_audio", "mixed") else set())
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", ["llama4", "mistral3"])
def test_angles_that_are_complex_or_have_no_batch_reach_a_kernel(family):
    """Llama 4's, and Pixtral's in Mistral 3."""
    model = tiny_model(family)
    batch = media_batch(model)
    wanted, gradients = step(model, batch)
    specs = tuple(
        KernelSpec("own", "rotary_pos_emb", variant, f"veomni_ops.rotary_pos_emb:{variant}")
        for variant in ("full", "pairwise")
    )
    record = PluginRecord("one", "veomni-one", "1.0", __name__, kernels=specs)
    registry = vouching(build_registry([*definitions(), record], {}), *specs, distribution="veomni-one")
    binding = bind(model, {"preset": "eager", "rotary_pos_emb_implementation": "own"}, registry=registry)
    (rotations,) = (op for op in binding.plan.ops if op.op_name == "rotary_pos_emb")
    forms = {decision.site.detail.get("angles") for decision in rotations.sites if decision.bound}
    assert {"llama4": "complex", "mistral3": "unbatched"}[family] in forms
    loss, found = step(model, batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-5)
