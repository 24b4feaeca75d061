"""The smallest input that a tower takes, found by trying forms of inputs on a small copy of the tower on the CPU."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from veomni_core.changes.bound_subclass import EAGER, eager_class
from veomni_transformers.proving import probe
from veomni_transformers.towers.feature_calls import FeatureCall, read_tensors
from veomni_transformers.towers.parts import AUDIO, VISION, tower_kind

Inputs = dict[str, Tensor]
_EMBEDDINGS = "get_input_embeddings"
_LAYERS = 2  # of each stack in the copy; whether an input is valid shows in the first ones
_NUMBERS_OF_IMAGES = ((1,), (1, 1), (1, 2))  # some towers take a picture whole and in parts
_ABOUT = ("_ids", "_mask")  # of tiles
_FRAMES = (8, 16, 64, 100, 128, 200, 3000)


def smallest_input(module: Any, call: FeatureCall) -> tuple[Inputs, str]:
    """The arguments of ``call`` on ``module`` for one small image, video or sound, float32 on the CPU.

    They were run on a copy of the towers with random weights and few layers: the features are finite, and every
    gradient that a sum of them at zero weight leaves on the copy's weights is zero.

    Returns:
        The arguments, and an empty text; or no arguments, and what the last form of inputs led to.
    """
    why_not = call.why_not or "no part of it takes such inputs"
    for layers in () if call.why_not else (_LAYERS, None):
        with probe.seeded():
            small, failed = probe.attempt(partial(small_copy, module, layers))
            if failed:
                return {}, failed
            for inputs in forms(module, call):
                _, why_not = probe.attempt(partial(_check, small, call, inputs))
                if not why_not:
                    return inputs, ""
    return {}, why_not


def _check(small: Any, call: FeatureCall, inputs: Inputs) -> None:
    check_zero(small, read_tensors(getattr(small, call.method)(**inputs), call.field))


def check_zero(small: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Raise unless ``tensors``, which ``small`` computed, are finite, and their sum at zero weight changes nothing."""
    if not tensors or not all(each.numel() and each.isfinite().all() for each in tensors):
        raise ValueError("the features are empty or not finite")
    small.zero_grad()
    torch.autograd.backward([each.sum() * 0 for each in tensors])
    gradients = [parameter.grad for parameter in small.parameters() if parameter.grad is not None]
    if not gradients or any(gradient.any() or not gradient.isfinite().all() for gradient in gradients):
        raise ValueError("no gradients, or some that are not zero")


def forms(module: Any, call: FeatureCall) -> Iterator[Inputs]:
    """Forms in which transformers' towers take inputs, from small to large."""
    wanted = AUDIO if call.modality == "audio" else VISION
    tower: Any = next((each for each in module.modules() if tower_kind(each) == wanted), None)
    if tower is None:
        return
    taken = inspect.signature(getattr(type(module), call.method)).parameters
    made = (each for each in tower.modules() if isinstance(each, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
    first: Any = next(made, None) or next(each for each in tower.modules() if isinstance(each, nn.Linear))
    yield from (_sounds if wanted == AUDIO else _images)(call.argument, taken, tower, tuple(first.weight.shape))


def _images(argument: str, taken: Any, tower: Any, shape: tuple[int, ...]) -> Iterator[Inputs]:
    config = tower.config
    grid = next((name for name in taken if name.endswith("grid_thw")), None)
    width = torch.Size(shape[1:]).numel()
    if grid is not None:  # patches in rows, and how many there are in time, height and width
        merges = [getattr(config, "spatial_merge_size", None), 1, 2, 4]
        for merge in dict.fromkeys(each for each in merges if isinstance(each, int)):
            yield {argument: _values_of(merge * merge, width), grid: torch.tensor([[1, merge, merge]])}
        return
    patch = shape[-1] if len(shape) > 2 else next(iter(_sizes(config, "patch_size")), 1)
    small, stated = [patch * merge for merge in (1, 2, 4)], [*_sizes(config, "image_size")]
    sizes = [*small, *stated] if "image_sizes" in taken else [*stated, *small]  # a tower for one size has one alone
    channels = shape[1] if len(shape) > 2 else 3
    for size, images, told in product(dict.fromkeys(sizes), _NUMBERS_OF_IMAGES, (False, True)):
        inputs = {argument: _values_of(*images, channels, size, size)}
        if not told:
            yield inputs
        elif "image_sizes" in taken:
            yield inputs | {"image_sizes": torch.tensor([[size, size]])}
    for tiles, size in product(_sizes(config, "max_num_tiles"), sizes):
        images = 1, 1, tiles
        of_tower = inspect.signature(type(tower).forward).parameters.keys() & taken.keys()
        beside = {name: images[:2] if name.endswith("_ids") else images for name in of_tower - {argument}}
        told = {name: torch.ones(shape, dtype=torch.long) for name, shape in beside.items() if name.endswith(_ABOUT)}
        yield {argument: _values_of(*images, channels, size, size), **told}
    if "spatial_shapes" in taken:
        inputs = {argument: _values_of(1, 4, width), "spatial_shapes": torch.tensor([[2, 2]])}
        yield inputs | {"pixel_attention_mask": torch.ones(1, 4, dtype=torch.long)}


def _sounds(argument: str, taken: Any, tower: Any, shape: tuple[int, ...]) -> Iterator[Inputs]:
    bins = getattr(tower.config, "num_mel_bins", shape[1])
    positions = getattr(tower.config, "max_source_positions", None)
    frames = [*_FRAMES, *([2 * positions] if isinstance(positions, int) else [])]
    masks = [name for name in taken if name.endswith("_mask")]
    for length, masked in product(sorted(frames), (True, False)):
        inputs = {argument: _values_of(1, bins, length)}
        if masked:
            inputs |= {name: torch.ones(1, length, dtype=torch.long) for name in masks}
        yield inputs


def _values_of(*shape: int) -> Tensor:
    """Not zeros: Idefics leaves out images of zeros, which it takes for padding."""
    return torch.full(shape, 0.5)


def _sizes(config: Any, name: str) -> Iterator[int]:
    value = getattr(config, name, None)
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple) and value and isinstance(value[0], int):
        yield value[0]


def small_copy(module: nn.Module, layers: int | None, repeated: bool = False, attention: str = "eager") -> nn.Module:
    """A copy of ``module`` in float32 on the CPU with its own code; children with embeddings of words are shared.

    Of equal layers it has the first ``layers``, which ``repeated`` puts in the place of the others too.
    ``attention`` is transformers' name of what computes its attention.
    """
    configs: dict[int, Any] = {}
    words: Any = None if tower_kind(module) else getattr(module, _EMBEDDINGS, lambda: None)()
    shared = {id(each) for each in module.children() if any(inner is words for inner in each.modules())}

    def small(each: nn.Module) -> nn.Module:
        twin = probe.bare_copy(each)
        _run_own_code(twin, configs, attention)
        for name, value in each._parameters.items():
            if value is not None:
                scale = max(value.shape[-1:] or [1]) ** -0.5
                twin._parameters[name] = nn.Parameter(probe.random(*value.shape, scale=scale))
        twin._buffers.update({name: _values(buffer) for name, buffer in each._buffers.items() if buffer is not None})
        children = [(name, child) for name, child in each._modules.items() if child is not None]
        names = [name for name, _ in children]
        if isinstance(each, nn.ModuleList) and len({type(child) for _, child in children}) == 1:
            children = children[:layers]
        made = [child if id(child) in shared else small(child) for _, child in children]
        twin._modules.update(
            {name: made[n % len(made)] for n, name in enumerate(names if repeated else names[: len(made)])}
        )
        return twin

    twin = small(module)
    for child in twin.children():
        if id(child) not in shared:
            child.train(False)  # dropout draws nothing
    return twin


def with_own_code(twin: nn.Module) -> nn.Module:
    """``twin``, a copy, whose parts then run their own code, with eager attention."""
    configs: dict[int, Any] = {}
    for each in twin.modules():
        _run_own_code(each, configs, "eager")
    return twin


def _run_own_code(twin: nn.Module, configs: dict[int, Any], attention: str) -> None:
    """As :func:`with_own_code` of one module; ``configs`` are the copies of configs by the ids of their originals."""
    twin.__class__ = own_class(twin)
    for name, value in vars(twin).items():
        if isinstance(value, PretrainedConfig):
            if id(value) not in configs:
                configs[id(value)] = copy.deepcopy(value)
                configs[id(value)]._attn_implementation = attention
            vars(twin)[name] = configs[id(value)]
    vars(twin).pop("_output_capturing_hooks_installed", None)  # transformers installs them again; none was copied


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class whose forward is the model's own code, also beneath a class of FSDP2."""
    return next((eager_class(kind) for kind in type(module).__mro__ if EAGER in vars(kind)), type(module))


def _values(buffer: Tensor) -> Tensor:
    if buffer.is_meta or isinstance(buffer, DTensor):
        made = probe.random(*buffer.shape)
        return made if buffer.is_floating_point() else torch.zeros(buffer.shape, dtype=buffer.dtype)
    made = buffer.detach().to("cpu", copy=True)
    return made.float() if made.is_floating_point() else made
