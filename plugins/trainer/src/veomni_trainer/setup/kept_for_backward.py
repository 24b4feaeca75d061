"""Measures how many bytes a model's forward keeps for its backward, layer by layer."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True)
class KeptBytes:
    """What one forward keeps until its backward, besides weights.

    Attributes:
        layers: the bytes of each of the model's layers, in their order.
        rest: the bytes of everything else: the embeddings, the last norm, the head with its logits, and the loss.
    """

    layers: tuple[int, ...]
    rest: int


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers, of which gradient checkpointing keeps only the inputs."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(each) for layer in layers for each in layer.modules() if each is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def kept_for_backward(model: nn.Module, inputs: dict[str, Any], autocast: torch.dtype | None) -> KeptBytes:
    """Run one forward of ``model`` on ``inputs``, and count the memory of the tensors that autograd saves.

    Memory that several tensors share counts once, for the layer that saved it first. Weights and buffers don't count.
    """
    counter = _Counter(model)
    device = next(model.parameters()).device.type
    with ExitStack() as stack:
        for index, layer in enumerate(layers_of(model)):
            stack.callback(layer.register_forward_pre_hook(counter.entering(index)).remove)
            stack.callback(layer.register_forward_hook(counter.leave).remove)
        stack.enter_context(torch.autocast(device, autocast, enabled=autocast is not None))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack))
        output = model(**inputs)  # stays alive, so that no memory is counted twice under one address
        count = len(layers_of(model))
        del output
    return KeptBytes(tuple(counter.bytes[index] for index in range(count)), counter.bytes[None])


class _Counter:
    """Adds up what is saved while each layer runs; ``None`` stands for outside of every layer."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes: Counter[int | None] = Counter()
        self._seen = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._layer: int | None = None

    def entering(self, index: int) -> Any:
        def enter(*_: Any) -> None:
            self._layer = index

        return enter

    def leave(self, *_: Any) -> None:
        self._layer = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (memory := _memory(tensor)) not in self._seen:
            self._seen.add(memory)
            self.bytes[self._layer] += tensor.untyped_storage().nbytes()
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
