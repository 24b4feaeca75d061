"""Inputs for parts of models that take no words: patches in rows, pictures, sounds, and what lies between towers.

Nothing says which shapes a tower takes. So forms of inputs are tried, from those with most to see: pictures of several
sizes and several frames, windows that are not full, and positions that are padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from veomni_transformers.proving.hollow_twin import BATCH, LENGTH, ZERO

Inputs = dict[str, Any]
_PATCHES = 32  # the most patches along an image's side: Pixtral's 96 by 96 would need masks of 18432 by 18432
_OTHER_LENGTH = 7  # of what a cross-attention reads
_PIXELS = ("pixel_values", "pixel_values_videos", "pixel_values_images", "hidden_states", "patch_embeds")
PICTURES = ("pixel_values", "pixel_values_videos", "flattened_patches")
_SOUNDS = ("input_features", "input_values", "hidden_states", "latents")
_FRAMES = (64, 200, 1000)


def tower_inputs(module: Any, function: Callable[..., Any], padded: bool) -> Iterator[Inputs]:
    """Arguments with which ``function``, the forward or another method of ``module``, may run.

    ``padded``: only those that say of some positions that they are padding.
    """
    parameters = inspect.signature(function).parameters
    named = {name for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    named -= {"self"}
    needed = {name for name in named if parameters[name].default is inspect.Parameter.empty}
    seen: set[str] = set()
    for form in (each for kind in (_grids, _pictures, _sounds, _between) for each in kind(module, named, padded)):
        inputs = {name: value for name, value in form.items() if name in named}
        described = str({name: getattr(value, "shape", value) for name, value in sorted(inputs.items())})
        if inputs and needed <= inputs.keys() and described not in seen:
            seen.add(described)
            yield inputs


def _grids(module: Any, named: set[str], padded: bool) -> Iterator[Inputs]:
    """Patches in rows, with how many there are in time, height and width of each picture."""
    grids = [name for name in named if name.endswith(("grid_thw", "grid_hw"))]
    if not grids or padded:
        return
    stated = [*numbers(module, "spatial_merge_size"), *numbers(module, "merge_size")]
    for merge, several in product(dict.fromkeys((*stated, 2, 1, 4)), (True, False)):
        small = [1, merge, merge]
        large = [1, 2 * merge, 3 * merge] if merge > 2 else [1, 6 * merge, 10 * merge]
        for sizes in ([[2, 2 * merge, 2 * merge], large], [small, large]) if several else ([small],):
            grid = torch.tensor(sizes)
            count = int(grid.prod(-1).sum())
            merges = {name: torch.full((len(sizes),), merge) for name in named if name.endswith("merge_sizes")}
            for shape in _patch_shapes(module, count, merge):
                yield _given(_PIXELS, _zeros(*shape)) | dict.fromkeys(grids, grid) | merges


def _patch_shapes(module: Any, count: int, merge: int) -> Iterator[tuple[int, ...]]:
    for side, channels in product(numbers(module, "patch_size"), numbers(module, "num_channels")):
        if merge > 1:  # Inkling counts squares of several patches
            yield (count, merge * side, merge * side, channels)
    for weight in _first_weights(module):
        yield (count, weight[1:].numel())
        yield (count, *weight[1:])
        yield (1, count, weight[1:].numel())
        yield (1, count, *weight[1:])


def _pictures(module: Any, named: set[str], padded: bool) -> Iterator[Inputs]:
    if not named & {*_PIXELS, "flattened_patches"}:
        return
    masks = sorted(name for name in named if name.endswith("mask"))
    if padded and not masks:
        return
    for weight, (size, patch) in product(_first_weights(module), _sizes(module)):
        channels = weight[1] if len(weight) > 2 else next(numbers(module, "num_channels"), 3)
        count = (size // patch) ** 2
        side = min(2, size // patch) if "spatial_shapes" in named else size // patch
        for leading in ((BATCH,), (BATCH, 2), *((1, 1, tiles) for tiles in numbers(module, "max_num_tiles"))):
            shape = (*leading, channels, size, size)
            yield _told(_given(_PIXELS, _zeros(*shape)), masks, leading, size, patch, padded)
        rows = _given((*_PIXELS, "flattened_patches"), _zeros(BATCH, count, weight[1:].numel()))
        sides = torch.tensor([[side, side]] * BATCH)
        rows |= {"spatial_shapes": sides, "target_sizes": sides}
        yield rows | {name: _kept(BATCH, count, padded) for name in masks}
        few = _given(("flattened_patches",), _zeros(BATCH, LENGTH, weight[1:].numel() + 2))
        yield few | {name: _kept(BATCH, LENGTH, padded).float() for name in masks}
        strip = _zeros(1, channels, patch, patch * 4 * 4 * BATCH)  # MiniCPM-V: the patches of all pictures side by side
        yield _given(_PIXELS, strip) | {
            name: torch.tensor([[4, 4]] * BATCH) for name in named if "target_sizes" in name
        }
        if pooled := [name for name in named if name.endswith(("token_pooling", "pooled_patches_idx"))]:  # Molmo 2
            within = torch.arange(4 * LENGTH).view(LENGTH, 4) % count
            within[::3, 2:] = -1  # these tokens are made of two patches each
            grids = {name: torch.tensor([[1, LENGTH, 1, 0][: 3 if "video" in name else 4]]) for name in named}
            told = {name: grid for name, grid in grids.items() if name.endswith("grids")}
            yield rows | dict.fromkeys(pooled, within) | told


def _told(
    inputs: Inputs, masks: Iterable[str], leading: tuple[int, ...], size: int, patch: int, padded: bool
) -> Inputs:
    """``inputs`` with all that some towers want to know of pictures of one size."""
    pictures = torch.Size(leading).numel()
    sizes = torch.tensor([[size, size]] * pictures)
    tiles = leading[-1] if len(leading) == 3 else 1
    inputs |= {"image_sizes": sizes, "num_local_patches": torch.zeros(pictures, dtype=torch.long)}
    inputs |= {"aspect_ratio_ids": torch.ones(leading[0], 1, dtype=torch.long)}
    for name in masks:
        across = size // patch if name.startswith("patch") else size
        mask = torch.ones(*(leading if name.startswith("pixel") else leading[:1]), across, across, dtype=torch.bool)
        if padded:
            mask[0, ..., across // 2 :, :] = False
        inputs[name] = mask
    return inputs | {"aspect_ratio_mask": torch.ones(leading[0], 1, tiles, dtype=torch.long)}


def _sounds(module: Any, named: set[str], padded: bool) -> Iterator[Inputs]:
    masks = [name for name in named if name.endswith("mask") and not name.startswith("decoder")]
    lengths = [name for name in named if name.endswith(("lens", "lengths"))]
    if not named & {*_SOUNDS} or (padded and not masks):
        return
    words = {"decoder_input_ids": torch.full((BATCH, _OTHER_LENGTH), 3)}
    for shape in ((BATCH, 16000), (BATCH, 1, 1920 * LENGTH)) if "input_values" in named else ():
        yield _given(("input_values",), _zeros(*shape)) | {n: _kept(BATCH, shape[-1], padded) for n in masks} | words
        yield _given(("input_values",), _zeros(*shape)) | words
    bins = list(numbers(module, "num_mel_bins"))
    bins += [weight[1] for weight in _first_weights(module) if len(weight) <= 3] or [128, 80]
    frames = [*_FRAMES, *(2 * each for each in numbers(module, "max_source_positions"))]
    bins += list(numbers(module, "input_size"))
    for count, width in product(dict.fromkeys(frames), dict.fromkeys(bins)):
        if lengths:  # sounds of several lengths, one after another
            several = torch.tensor([count, count // 2])
            after = {"aftercnn_lens": (several - 1) // 2 + 1}
            for shape in ((width, int(several.sum())), (int(several.sum()), width)):
                yield _given(_SOUNDS, _zeros(*shape)) | dict.fromkeys(lengths, several) | after
            samples = several * next(numbers(module, "hop_length"), 1)
            yield _given(_SOUNDS, _zeros(BATCH, width, count)) | dict.fromkeys(lengths, samples)
        for shape in ((BATCH, width, count), (BATCH, count, width)):
            yield _given(_SOUNDS, _zeros(*shape)) | {name: _kept(BATCH, count, padded) for name in masks} | words
            if not padded and masks:
                yield _given(_SOUNDS, _zeros(*shape)) | words


def _between(module: Any, named: set[str], padded: bool) -> Iterator[Inputs]:
    """Features that a module between a tower and the decoder reads, with queries of its own."""
    config = getattr(module, "config", None)
    widths = dict.fromkeys(numbers(module, "hidden_size"))
    others = dict.fromkeys((*numbers(module, "encoder_hidden_size"), *widths, *(w[-1] for w in _first_weights(module))))
    for width, other in product(widths, others):
        known: Inputs = {"query_embeds": _zeros(BATCH, LENGTH, width), "inputs_embeds": _zeros(BATCH, LENGTH, width)}
        known |= {name: _zeros(BATCH, _OTHER_LENGTH, other) for name in ("encoder_hidden_states", "context")}
        known |= {"hidden_states": _zeros(BATCH, LENGTH, other), "latents": _zeros(BATCH, LENGTH, other)}
        known |= {"encoder_attention_mask": _kept(BATCH, _OTHER_LENGTH, padded)}
        known |= {"mask": _kept(BATCH, LENGTH, padded), "input_features_mask": _kept(BATCH, LENGTH, padded)}
        known |= {"attention_mask": _kept(BATCH, _OTHER_LENGTH if "context" in named else LENGTH, padded)}
        if "input_ids" in named and hasattr(config, "vocab_size"):
            known |= {"input_ids": torch.full((BATCH, _OTHER_LENGTH), 3), "query_embeds": _zeros(BATCH, LENGTH, width)}
            known |= {"attention_mask": _kept(BATCH, LENGTH + _OTHER_LENGTH, padded)}
        if not padded or any(name.endswith("mask") for name in named):
            yield known
            if not padded:
                yield {name: value for name, value in known.items() if not name.endswith("mask")}


def _given(names: Iterable[str], value: Tensor) -> Inputs:
    return dict.fromkeys(names, value)


def _kept(batch: int, length: int, padded: bool) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    if padded:
        mask[-1, length - length // 3 :] = 0
    return mask


def _zeros(*shape: int) -> Tensor:
    """Zeros that have memory: a tower may set those at padding to zero."""
    return torch.zeros(shape, dtype=ZERO.dtype)


def _first_weights(module: nn.Module) -> list[torch.Size]:
    """The shapes of the weights that may read the input: the first convolution's, and the first linear's."""
    found: dict[torch.Size, None] = {}
    for kinds in ((nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.Linear,)):
        first = next((each for each in module.modules() if isinstance(each, kinds)), None)
        if first is not None:
            found[first.weight.shape] = None  # type: ignore[union-attr]
    return list(found)


def _sizes(module: Any) -> Iterator[tuple[int, int]]:
    """``(size, patch)`` of pictures: as stated, not over 32 patches along a side, and small ones."""
    patches = [max(_pair(each)) for each in _values(module, "patch_size")]
    for patch in dict.fromkeys((*patches, *(weight[-1] for weight in _first_weights(module) if len(weight) > 2), 16)):
        stated = [max(_pair(each)) for each in _values(module, "image_size")]
        for size in dict.fromkeys((*(min(each, _PATCHES * patch) for each in stated), *stated, 8 * patch, 4 * patch)):
            if size >= patch:
                yield size, patch


def numbers(module: Any, name: str) -> Iterator[int]:
    """The whole numbers that the configs of ``module`` and of its parts state under ``name``."""
    yield from (value for value in _values(module, name) if type(value) is int)


def _values(module: Any, name: str) -> Iterator[Any]:
    """What the configs of ``module`` and of its parts state under ``name``."""
    seen: dict[int, Any] = {}
    for part in module.modules():
        config = vars(part).get("config")
        if config is not None and id(config) not in seen:
            seen[id(config)] = config
            value = getattr(config, name, None)
            if value is not None and value != []:
                yield value


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)[-2:]  # type: ignore[return-value]
