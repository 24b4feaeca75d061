"""Models of images, video and audio over ranks: their text is shared, their towers run whole on each."""

from __future__ import annotations

from typing import Any

import torch
from tiny_multimodal import media_batch, text_batch, tiny_model, with_kinds
from torch import Tensor
from torch.nn import functional as F
from ulysses_models import grads_equal
from ulysses_ranks import check, close, raises, size

from veomni_core import bind
from veomni_core.errors import ConfigError
from veomni_transformers.sequence import apply_ulysses, gather_outputs

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "paligemma", "llava", "internvl", "glm4v")


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


def equal_to_one_process(family: str, batch: dict[str, Tensor], ops: dict[str, Any] | None = None, **more: Any) -> None:
    reference, model = tiny_model(family), tiny_model(family)
    if more:
        for each in (reference, model):
            vars(each.config.get_text_config()).update(more)
    if ops:
        bind(model, ops)
    wanted = reference(**batch)
    wanted.loss.backward()
    with apply_ulysses(model) as applied:
        assert f"sp={size()}" in applied.describe()
        found = model(**batch)
        found.loss.backward()
    assert found.logits.shape[1] * size() == batch["input_ids"].shape[1]
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0)
    if getattr(wanted, "aux_loss", None) is not None:
        torch.testing.assert_close(found.aux_loss, wanted.aux_loss, rtol=1e-6, atol=0)
    if not ops:
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        close(gather_outputs(found.logits, 1)[kept], wanted.logits[kept], "logits")
    grads_equal(model, reference)


def a_family(family: str) -> None:
    model = tiny_model(family)
    equal_to_one_process(family, with_kinds(family, text_batch(2, 12)))
    equal_to_one_process(family, padded(media_batch(model)))
    equal_to_one_process(family, mixed_batch(model))


@check
def pictures_of_qwen3_vl_whose_layers_add_features_of_early_layers() -> None:
    a_family("qwen3_vl")


@check
def pictures_of_every_family() -> None:
    for family in FAMILIES:
        a_family(family)
