"""Measures the memory of one forward and backward: what is kept between them, layer by layer, and what comes on top."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one micro-step, besides weights and their gradients.

    Attributes:
        layers: what each of the model's layers keeps from its forward to its backward, in their order.
        rest: what everything else keeps: the embeddings, the last norm, the head with its logits, and the loss.
        brief: how far the peak is above what is kept. Known on accelerators, 0 on a CPU.
    """

    layers: tuple[int, ...]
    rest: int
    brief: int


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The model's layers, of which gradient checkpointing keeps only the inputs."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(each) for layer in layers for each in layer.modules() if each is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def step_memory(model: nn.Module, inputs: dict[str, Any], autocast: torch.dtype | None) -> StepMemory:
    """Run one forward and backward of ``model`` on ``inputs``, and count what autograd saves between them.

    Memory that several tensors share counts once, for the layer that saved it first. Weights and buffers don't count.
    """
    counter = _Counter(model)
    device = next(model.parameters()).device
    layers = layers_of(model)
    before = _reset_peak(device)
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(counter.entering(index)).remove)
            stack.callback(layer.register_forward_hook(counter.leave).remove)
        stack.enter_context(torch.autocast(device.type, autocast, enabled=autocast is not None))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack))
        loss = model(**inputs).loss
    loss.backward()
    kept = sum(counter.bytes.values())
    brief = max(_peak(device) - before - kept, 0) if device.type != "cpu" else 0
    return StepMemory(tuple(counter.bytes[index] for index in range(len(layers))), counter.bytes[None], brief)


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


def _reset_peak(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    accelerator = torch.get_device_module(device)
    accelerator.reset_peak_memory_stats(device)
    return int(accelerator.memory_allocated(device))


def _peak(device: torch.device) -> int:
    return int(torch.get_device_module(device).max_memory_allocated(device))
