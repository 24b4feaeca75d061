"""Estimates the memory that a job's training needs on each process, before its weights are loaded."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from veomni_core import OpsConfig
from veomni_trainer.job.precision import gradient_and_state_bytes
from veomni_trainer.job.schema import Job
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.setup.adapter import check_adapter, with_adapter
from veomni_trainer.setup.conditions import precision_of, weights_dtype
from veomni_trainer.setup.model import bound_model
from veomni_transformers.engine.parallel_plan import get_parallel_plan
from veomni_transformers.towers.parts import tower_of, towers


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device of one process. What the optimizer's step allocates briefly comes on top.

    Attributes:
        weights: the model's parameters and buffers.
        gradients: their gradients.
        optimizer: the optimizer's states.
        activations: what the layers keep for the backward.
        logits: what the rest of the model keeps: logits, as far as the bound loss has any, and the loss.
        brief: what the loss and the backward allocate for a moment; known on accelerators, 0 on a CPU.
        accumulates: whether gradients of earlier micro-steps are there during the forward.
        measured_layers: on how many layers activations were measured.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    brief: int
    accumulates: bool
    measured_layers: int

    @property
    def total(self) -> int:
        """The peak: where the backward begins, or where it ends.

        Gradients come as activations go. So they are added to each other only where gradients are accumulated.
        """
        begins = self.activations + self.logits + self.brief + (self.gradients if self.accumulates else 0)
        return self.weights + self.optimizer + max(begins, self.gradients)

    def to_dict(self) -> dict[str, Any]:
        """The parts and the peak."""
        return asdict(self) | {"total": self.total}


def estimate_memory(job: Job, ops: OpsConfig, skeleton: PreTrainedModel, device: torch.device) -> MemoryEstimate:
    """Add up the weights' share of one process, and measure what one micro-step keeps on ``device``.

    Activations are measured by running the bound model's first layers, until each kind of layer is among them, with
    random weights and one micro-batch. Tensor parallelism and expert parallelism divide activations further than that.

    Args:
        skeleton: the job's model on the meta device.

    Raises:
        VeOmniError: the model can't be built or bound.
        torch.OutOfMemoryError: one micro-batch of these layers is too large for ``device``.
    """
    kinds = [_kind(layer) for layer in layers_of(skeleton)]
    depth = _depth_with_every_kind(kinds)
    kept = _measure(job, ops, skeleton.config, depth, device)
    rest = kept.rest
    if depth > 1:  # a router's loss keeps something of every layer
        rest += (len(kinds) - depth) * (kept.rest - _measure(job, ops, skeleton.config, depth - 1, device).rest)
    if job.train.gradient_checkpointing:
        # Each layer keeps its input; the backward computes one layer at a time again.
        rows, length = _micro_batch(job)
        size = 4 if weights_dtype(job) == "float32" and precision_of(job).autocast is None else 2
        hidden = rows * length * skeleton.config.get_text_config().hidden_size
        activations = len(kinds) * hidden * size + max(kept.layers)
    else:
        # Of several layers of a kind the last one: the first keeps what all of them share, such as rotary angles.
        of_kind = dict(zip(kinds, kept.layers, strict=False))
        activations = sum(kept.layers) + sum(of_kind[kind] for kind in kinds[depth:])
    whole: nn.Module = check_adapter(job, skeleton) if job.lora else skeleton
    assert job.train.precision and job.train.optimizer_name  # the machine's defaults are filled in
    gradient, state = gradient_and_state_bytes(job.train.precision, job.train.optimizer_name)
    trained = _elements(whole, skeleton, job.train, trained=True)
    return MemoryEstimate(
        weights=_weight_bytes(job, whole, skeleton) + sum(buffer.nbytes for buffer in skeleton.buffers()),
        gradients=int(trained * gradient),
        optimizer=int(trained * state),
        activations=activations,
        logits=rest,
        brief=kept.brief,
        accumulates=job.train.gradient_accumulation > 1,
        measured_layers=depth,
    )


def _depth_with_every_kind(kinds: Sequence[Any]) -> int:
    """How many first layers have every kind among them; two at least, since the first one is not like the others."""
    return min(len(kinds), max(2, 1 + max(kinds.index(kind) for kind in set(kinds))))


def _measure(job: Job, ops: OpsConfig, config: PretrainedConfig, depth: int, device: torch.device) -> StepMemory:
    model = bound_model(job, _shortened(config, depth), ops, str(device), agree=False)
    trained: nn.Module = with_adapter(model, job) if job.lora else model
    trained.train()
    ids = torch.randint(config.get_text_config().vocab_size, _micro_batch(job), device=device)
    labels = ids[:, 0] % (config.num_labels or 1) if job.train.scores_sequences else ids
    autocast = precision_of(job).autocast
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    return step_memory(trained, inputs, getattr(torch, autocast) if autocast else None)


def _shortened(config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """A copy of ``config`` with its first ``depth`` layers; what it lists for each layer is cut too."""
    short = copy.deepcopy(config)
    text: Any = short.get_text_config()
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == whole:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return short


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What layers have in common that keep the same memory: their modules' classes and their parameters' shapes."""
    modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


def _weight_bytes(job: Job, whole: nn.Module, skeleton: PreTrainedModel) -> int:
    """The bytes of one process's weights. Linear layers that are quantized take half a byte for each weight."""
    size = 4 if weights_dtype(job) == "float32" else 2
    trained = _elements(whole, skeleton, job.train, trained=True)
    frozen = _elements(whole, skeleton, job.train, trained=False)
    quantized = 0
    if job.lora and job.lora.quantization:
        head = skeleton.get_output_embeddings()
        linears = (module for module in skeleton.modules() if isinstance(module, nn.Linear) and module is not head)
        quantized = sum(linear.weight.numel() for linear in linears)
    return (trained + frozen - quantized) * size + quantized // 2


def _elements(whole: nn.Module, skeleton: PreTrainedModel, train: TrainSection, *, trained: bool) -> int:
    """How many elements of the parameters that are trained, or are not, one process holds."""
    named = [(name, p) for name, p in whole.named_parameters() if p.requires_grad == trained]
    if not train.is_sharded or (trained and whole is not skeleton):  # an adapter lies whole on each process
        return sum(parameter.numel() for _, parameter in named)
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    plan = get_parallel_plan(skeleton)
    total = 0
    for name, parameter in named:
        path = replace_layer_number_by_wildcard(name)
        if train.ep_size > 1 and path in plan.extra_parallel_plan["ep"]:
            divisor = train.fsdp_size * train.tp_size
        else:
            divisor = train.fsdp_size * (train.tp_size if path in plan.tp else 1)
        total += -(-parameter.numel() // divisor)
    return total


def _micro_batch(job: Job) -> tuple[int, int]:
    """The rows and the tokens of each that a process computes at a time."""
    train = job.train
    return train.batch_size * train.sequences_per_row, job.data.sequence_length // train.ranks_per_sequence


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
    saved: list[tuple[weakref.ref[_Saved], int | None]] = []  # with the layer that ran; None: outside of every layer
    running: list[int] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        each = _Saved(tensor)
        saved.append((weakref.ref(each), running[-1] if running else None))
        return each

    device, layers = next(model.parameters()).device, layers_of(model)
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    if accelerator:
        accelerator.reset_peak_memory_stats(device)
    before = accelerator.memory_allocated(device) if accelerator else 0
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(lambda *_, index=index: running.append(index)).remove)
            stack.callback(layer.register_forward_hook(lambda *_: running.clear()).remove)
        stack.enter_context(torch.autocast(device.type, autocast, enabled=autocast is not None))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, attrgetter("tensor")))
        loss = model(**inputs).loss
    kept = _held_bytes(saved, {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())})
    loss.backward()
    brief = max(accelerator.max_memory_allocated(device) - before - kept.total(), 0) if accelerator else 0
    return StepMemory(tuple(kept[index] for index in range(len(layers))), kept[None], brief)


class _Saved:
    """A tensor that autograd saves, for as long as its graph holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _held_bytes(saved: Iterable[tuple[weakref.ref[_Saved], int | None]], known: set[int]) -> Counter[int | None]:
    """The bytes that graphs hold, by layer, beside ``known`` memory.

    What a graph has let go of is forgotten, since other tensors may lie at its address now.
    """
    found: Counter[int | None] = Counter()
    for reference, layer in saved:
        if (held := reference()) is not None and (memory := _memory(held.tensor)) not in known:
            known.add(memory)
            found[layer] += held.tensor.untyped_storage().nbytes()
    return found
