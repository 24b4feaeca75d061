"""Measures the memory of one forward and backward: what is kept between them, layer by layer, and what comes on top."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from veomni_transformers.towers.parts import tower_of, towers


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
    """The layers of the model's text decoder, of which gradient checkpointing keeps only the inputs."""
    beside, modules = towers(model), model.named_modules()
    layers = [
        each for name, each in modules if isinstance(each, GradientCheckpointingLayer) and not tower_of(beside, name)
    ]
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
    kept = counter.bytes()
    loss.backward()
    brief = max(_peak(device) - before - kept.total(), 0) if device.type != "cpu" else 0
    return StepMemory(tuple(kept[index] for index in range(len(layers))), kept[None], brief)


class _Saved:
    """A tensor that autograd saves, for as long as its graph holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Counter:
    """Knows which memory autograd holds, and which layer ran when it was saved; ``None``: outside of every layer.

    What a graph lets go of before the backward is forgotten, since other tensors may lie at its address then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._held: dict[int, tuple[int | None, int]] = {}  # by address: the layer, and the bytes
        self._holders: Counter[int] = Counter()
        self._layer: int | None = None

    def bytes(self) -> Counter[int | None]:
        """The bytes that are held now, by layer."""
        found: Counter[int | None] = Counter()
        for layer, size in self._held.values():
            found[layer] += size
        return found

    def entering(self, index: int) -> Any:
        def enter(*_: Any) -> None:
            self._layer = index

        return enter

    def leave(self, *_: Any) -> None:
        self._layer = None

    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved, memory = _Saved(tensor), _memory(tensor)
        if memory not in self._weights:
            self._held.setdefault(memory, (self._layer, tensor.untyped_storage().nbytes()))
            self._holders[memory] += 1
            weakref.finalize(saved, self._let_go, memory)
        return saved

    def unpack(self, saved: _Saved) -> torch.Tensor:
        return saved.tensor

    def _let_go(self, memory: int) -> None:
        self._holders[memory] -= 1
        if not self._holders[memory]:
            del self._held[memory]


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
