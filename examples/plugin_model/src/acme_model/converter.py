"""Reads Acme's published checkpoints: queries, keys and values in one tensor, gate and up in two."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from veomni_transformers.plugin_models import ConvertedCheckpointTensor

_BLOCK = re.compile(r"blocks\.(\d+)\.(wqkv|w1|w3)")


def create_acme_checkpoint_tensor_converter(model: Any) -> AcmeCheckpointTensorConverter:
    """A converter for ``model``, which may be alone or the text part of another."""
    config = getattr(model.config, "text_config", model.config)
    return AcmeCheckpointTensorConverter(config.num_attention_heads, config.num_key_value_heads)


class AcmeCheckpointTensorConverter:
    """``blocks.N.wqkv [(Q + 2K) D, H]``, its rows by group of queries, and ``w1``, ``w3 [I, H]``."""

    def __init__(self, heads: int, groups: int) -> None:
        self._per_group = heads // groups
        self._groups = groups
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def can_handle(self, name: str) -> bool:
        return _BLOCK.fullmatch(name) is not None

    def convert(self, name: str, tensor: Tensor) -> ConvertedCheckpointTensor | list[ConvertedCheckpointTensor] | None:
        match = _BLOCK.fullmatch(name)
        assert match
        layer, kind = f"model.layers.{match[1]}", match[2]
        if kind == "wqkv":
            rows = tensor.unflatten(0, (self._groups, self._per_group + 2, -1))
            parts = rows.split([self._per_group, 1, 1], dim=1)
            return [
                ConvertedCheckpointTensor(f"{layer}.self_attn.{each}_proj.weight", part.flatten(0, 2).contiguous())
                for each, part in zip("qkv", parts, strict=True)
            ]
        found = self._waiting.setdefault(layer, {})
        found[kind] = tensor
        if len(found) < 2:
            return None
        del self._waiting[layer]
        return ConvertedCheckpointTensor(f"{layer}.mlp.gate_up.weight", torch.cat([found["w1"], found["w3"]]))

    def finalize(self) -> list[ConvertedCheckpointTensor]:
        if self._waiting:
            layer, found = next(iter(self._waiting.items()))
            raise ValueError(f"{layer} has {', '.join(found)} alone of w1 and w3")
        return []
