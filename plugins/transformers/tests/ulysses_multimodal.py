"""Models of images, video and audio over ranks: their text is shared, their towers run whole on each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tiny_multimodal import media_batch, text_batch, tiny_model, with_kinds
from torch import Tensor
from torch.nn import functional as F
from ulysses_hybrids import OPS
from ulysses_models import grads_equal, grads_equal_as_wholes, packed_positions, registry
from ulysses_ranks import check, close, raises, size

from models import EVERY_KERNEL
from veomni_core import bind
from veomni_core.errors import BindingError, ConfigError
from veomni_transformers.sequence import apply_ulysses, gather_outputs
from veomni_transformers.towers import towers
from veomni_transformers.towers.host_metadata import HostMetadata

PICTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "glm4v", "gemma3", "paligemma", "llava", "llava_next")
PICTURES += ("internvl", "mistral3", "idefics3", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


def padded(batch: dict[str, Tensor], length: int = 0) -> dict[str, Tensor]:
    """``batch`` with padding at the end, to ``length`` or a multiple of the ranks."""
    ids = batch["input_ids"]
    missing = length - ids.shape[1] if length else -ids.shape[1] % size()
    given = {"attention_mask": torch.ones_like(ids), **batch}
    fill = {"labels": -100}
    return {
        name: F.pad(each, (0, missing), value=fill.get(name, 0)) if each.shape == ids.shape else each
        for name, each in given.items()
    }


def mixed_batch(model: Any, modality: str = "image") -> dict[str, Tensor]:
    """A row with a picture, and one of text alone, which is padded."""
    with_picture = padded(media_batch(model, modality))
    length = with_picture["input_ids"].shape[1]
    text = padded(with_kinds(model.config.model_type, text_batch(1, 9)), length)
    return {name: torch.cat([each, text[name]]) if name in text else each for name, each in with_picture.items()}


def across_ranks(model: Any, modality: str = "image") -> dict[str, Tensor]:
    """A row in the middle of which, where ranks' parts end, a picture is."""
    batch = media_batch(model, modality)
    before = with_kinds(model.config.model_type, text_batch(1, 2, seed=1))
    joined = {name: torch.cat([before[name], batch[name]], 1) for name in before}
    return padded({**batch, **joined})


def equal_to_one_process(
    family: str,
    batch: dict[str, Tensor],
    ops: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    overlap: bool = False,
) -> None:
    """Loss, logits and the mean of the ranks' gradients are those of one process, in the towers too."""
    reference, model = tiny_model(family), tiny_model(family)
    reference.config.get_text_config().use_cache = (
        False  # beside a cache transformers doesn't look for packed sequences
    )
    if dtype == torch.float64:  # which grouped matrix products don't know
        for each in (reference, model):
            each.set_experts_implementation("eager")
    if ops:
        bind(model, ops, registry=registry())
    if ops is OPS:  # transformers' own delta rule computes in float32
        bind(reference, ops, registry=registry())
    batch = {name: each.to(dtype) if each.is_floating_point() else each for name, each in batch.items()}
    wanted = reference.to(dtype)(**batch)
    wanted.loss.backward()
    with apply_ulysses(model.to(dtype), overlap=overlap) as applied:
        assert f"sp={size()}" in applied.describe()
        found = model(**batch)
        found.loss.backward()
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0)
    if getattr(wanted, "aux_loss", None) is not None:
        torch.testing.assert_close(found.aux_loss, wanted.aux_loss, rtol=1e-6, atol=0)
    if not ops:
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        close(gather_outputs(found.logits, 1)[kept], wanted.logits[kept], "logits")
    grads_equal_as_wholes(model, reference)
    beside = {path for paths in towers(model).values() for path in paths}
    given = any(name in batch for name in ("pixel_values", "pixel_values_videos", "input_features"))
    learned = [name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()]
    assert given == any(name.startswith(tuple(beside)) for name in learned)


def of_pictures(family: str, ops: dict[str, Any] | None = None) -> None:
    model = tiny_model(family)
    equal_to_one_process(family, with_kinds(family, text_batch(2, 12)), ops)
    equal_to_one_process(family, across_ranks(model), ops)
    equal_to_one_process(family, mixed_batch(model), ops)


@check
def features_of_early_layers_are_added_on_the_rank_of_their_positions() -> None:
    of_pictures("qwen3_vl")


@check
def pictures_of_every_family() -> None:
    for family in PICTURES:
        of_pictures(family)


@check
def pictures_in_hybrids() -> None:
    for family in ("qwen3_5", "qwen3_5_moe"):
        of_pictures(family, OPS)
        equal_to_one_process(family, across_ranks(tiny_model(family), "video"), OPS)


@check
def video_and_sound() -> None:
    for family in ("qwen2_5_vl", "qwen3_vl"):
        equal_to_one_process(family, across_ranks(tiny_model(family), "video"))
    for family in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
        equal_to_one_process(family, across_ranks(tiny_model(family), "audio"))


@check
def every_kernel_bound_in_a_model_of_pictures() -> None:
    one_process = {**EVERY_KERNEL, "attn_implementation": "sdpa"}
    for family in ("qwen3_vl_moe", "gemma3"):
        equal_to_one_process(family, mixed_batch(tiny_model(family)), one_process, torch.float32)


@check
def a_kernel_that_takes_lengths_in_a_decoder() -> None:
    ops = {"preset": "eager", "attn_implementation": {"*language_model": "by_lengths", "default": "sdpa"}}
    for family in ("qwen3_vl", "llava"):
        equal_to_one_process(family, mixed_batch(tiny_model(family)), ops, torch.float32)


@check
def what_towers_were_given_is_not_passed_on() -> None:
    model = tiny_model("qwen3_vl")
    batch = across_ranks(model)
    found = HostMetadata(model)(batch)
    assert {"image_cu_seqlens", "position_ids"} <= {*found}
    equal_to_one_process("qwen3_vl", {**batch, **found})


@check
def packed_text_with_positions_of_four_rows() -> None:
    batch = with_kinds("qwen3_vl", text_batch(1, 16))
    positions = packed_positions().expand(4, 1, -1)
    equal_to_one_process("qwen3_vl", {**batch, "position_ids": positions})


@check
def layers_and_towers_that_are_computed_again_in_backward() -> None:
    reference, model = (tiny_model("qwen3_vl").double() for _ in range(2))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_ulysses(model)
    batch = across_ranks(model)
    batch["pixel_values"] = batch["pixel_values"].double()
    for each in (reference, model):
        each(**batch).loss.backward()
    grads_equal(model, reference)


@check
def a_decoder_of_which_not_every_argument_can_be_cut_is_refused() -> None:
    for family, text in (
        ("mllama", "MllamaTextModel) takes cross_attention_states, cross_attention_mask, full_text"),
        ("llama4", "it uses chunked attention"),
        ("qwen2_audio", "computes its loss itself"),
        ("whisper", "it has an encoder and a decoder"),
    ):
        raises(ConfigError, text, lambda family=family: apply_ulysses(tiny_model(family)))
    model = tiny_model("qwen3_vl")
    applied = apply_ulysses(model)
    raises(BindingError, "outside of the model", lambda: model.model.language_model(text_batch()["input_ids"]))
    applied.undo()
    # A decoder that shares its config with a module beside it, whose attention would see other heads of the same.
    model.model.after = copy.deepcopy(model.model.visual.blocks[0].attn)
    model.model.after.config = model.config.text_config
    raises(ConfigError, "model.after outside of its decoder model.language_model", lambda: apply_ulysses(model))
