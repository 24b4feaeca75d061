"""Experts that a checkpoint stores transposed, where the shape of a square weight doesn't say so.

transformers transposes such weights of some model types (Qwen3-VL-MoE's) if their shape is not the model's. With
``2I = H`` gate and up are square, with ``I = H`` down is, and would be loaded as they are. The experts' other weight
says how both are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from veomni_core.errors import CheckpointError


def square_and_transposed(path: Path, skeleton: Any) -> tuple[str, ...]:
    """The parameters of ``skeleton`` that are stored transposed in the folder ``path``, and won't be on loading.

    Raises:
        CheckpointError: some of the weights beside them are stored transposed, and some are not.
    """
    shapes = {name: tuple(p.shape) for name, p in skeleton.named_parameters()}
    patterns = [re.compile(pattern) for pattern in decided_by_shape(skeleton)]
    decided = {name: shape for name, shape in shapes.items() if any(each.search(name) for each in patterns)}
    square = tuple(name for name, shape in decided.items() if shape[-1] == shape[-2])
    if not square:
        return ()
    expected = {(name.rpartition(".")[2], shape) for name, shape in decided.items() if name not in square}
    stored: dict[bool, str] = {}
    for name, shape in _stored(path):
        leaf = name.rpartition(".")[2]
        if any(each.search(name) for each in patterns) and shape[-1:] != shape[-2:-1]:
            turned = (*shape[:-2], shape[-1], shape[-2])
            stored |= {
                is_turned: name
                for is_turned, as_model in ((False, shape), (True, turned))
                if (leaf, as_model) in expected
            }
    if len(stored) > 1:
        raise CheckpointError(
            f"{path} stores {stored[True]} transposed and {stored[False]} not, so it can't be told how {square[0]} is "
            "stored, which is square. Save it again from the model, with all experts stored alike"
        )
    return square if True in stored else ()


def refuse_divided(path: Path, names: tuple[str, ...]) -> None:
    """Raise if weights that must be transposed after loading would be divided over ranks, or quantized, by then."""
    if names:
        raise CheckpointError(
            f"{path} stores {names[0]} transposed, which transformers can't see, since it is square. Load it once "
            "whole by build_foundation_model, without distributed_config and quantization_config, and save_pretrained "
            "it: then it is stored as the model has it"
        )


def transpose(model: Any, names: tuple[str, ...]) -> None:
    """Transpose these parameters of ``model``, in place."""
    with torch.no_grad():
        for parameter in map(model.get_parameter, names):
            parameter.copy_(parameter.transpose(-1, -2).clone())


def decided_by_shape(skeleton: Any) -> Iterator[str]:
    """Patterns of the names of those weights that transformers transposes where their shape is not the model's."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # an older transformers, which loads every weight as it is stored
        return
    for converter in get_model_conversion_mapping(skeleton):
        if any(getattr(each, "check_dims", False) for each in getattr(converter, "operations", ())):
            yield from converter.target_patterns


def _stored(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in list(tensors.keys()):
                yield name, tuple(tensors.get_slice(name).get_shape())
