"""Batches for models of text, and of text and images: in the latter each sequence has one picture of noise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from veomni_transformers.towers.host_metadata import HostMetadata

SIDE = 1024
_BEFORE = 16  # words before the picture


def inputs_of(model: PreTrainedModel, batch: str, side: int = SIDE) -> dict[str, Tensor]:
    """Random words, and where the model takes them pictures.

    Args:
        model: the model.
        batch: sequences and their length, as ``4x4096``.
        side: pixels of a picture's height and width, or the next lower number that whole patches fill; 0 for none.
    """
    rows, length = map(int, batch.split("x"))
    config: Any = model.config
    # An id that stands for a picture, or opens one, is among the vocabulary's last.
    words = min(config.get_text_config().vocab_size, getattr(config, "vision_start_token_id", 1 << 30))
    ids = torch.randint(0, words, (rows, length), device=model.device)
    if not side or not hasattr(config, "vision_config"):
        return {"input_ids": ids, "labels": ids}
    vision = config.vision_config
    merged = vision.patch_size * vision.spatial_merge_size
    features = side // merged  # of a picture's height, as the decoder takes them
    patches = features * vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids[:, _BEFORE] = config.vision_start_token_id
    ids[:, _BEFORE + 1 : _BEFORE + 1 + features**2] = config.image_token_id
    inputs = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == config.image_token_id, -100),
        "pixel_values": torch.randn(rows * patches**2, width, device=model.device, dtype=model.dtype),
        "image_grid_thw": torch.tensor([[1, patches, patches]] * rows, device=model.device),
    }
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:  # since transformers 5.3
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).int()
    return inputs


def with_positions_of(model: PreTrainedModel) -> Callable[[str], dict[str, Tensor]]:
    """:func:`inputs_of` of ``model``, with what the host can compute of pictures and positions before a step."""
    metadata = HostMetadata(model)

    def made(batch: str) -> dict[str, Tensor]:
        inputs = inputs_of(model, batch)
        found = metadata({name: value.cpu() for name, value in inputs.items()})
        return inputs | {name: value.to(model.device) for name, value in found.items()}

    return made
