"""Whether two checkpoints hold the same weights, whatever their layouts: keys, bits, and one forward."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import dot_natural_key

from veomni_core.errors import CheckpointError
from veomni_tools.checkpoints.checkpoint import Checkpoint
from veomni_tools.checkpoints.conversion import canonical, converted, copied
from veomni_tools.checkpoints.report import readable
from veomni_transformers.build import load_as_trained

_TOKENS = 16


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[str]:
    """Each weight that one of them lacks, or that differs in dtype, shape or bits, in a sentence.

    Experts are compared one by one, in one layout, and each other tensor with that for the same parameter.

    Raises:
        CheckpointError: experts are missing, or their layout is not known.
    """
    first.refuse_incomplete_experts()
    second.refuse_incomplete_experts()
    if type(first.model) is not type(second.model):
        yield f"the first is a {type(first.model).__name__}, the second a {type(second.model).__name__}"
        return
    mine, yours = _by_place(first), _by_place(second)
    for place in sorted({*mine, *yours}, key=dot_natural_key):
        if place not in mine or place not in yours:
            yield f"{place} is in the {'first' if place in mine else 'second'} alone"
            continue
        yield from _of_pair(place, first, mine[place], second, yours[place])
    for name, parameter in first.parameters.items():
        ours, theirs = first.experts[name], second.experts[name]
        if parameter.shape != theirs.parameter.shape:
            yield f"{name} is {list(parameter.shape)} in the first, {list(theirs.parameter.shape)} in the second"
            continue
        for expert in range(parameter.shape[0]):
            said = _difference(canonical(first.files, ours, expert), canonical(second.files, theirs, expert))
            if said:
                yield f"expert {expert} of {name} {said}"


def compare_forward(first: Checkpoint, second: Checkpoint, trust_remote_code: bool = False) -> str:
    """Load both, one after the other, and compare their logits for a few tokens; the outcome in words.

    Raises:
        CheckpointError: they can't be loaded, or compute other logits.
    """
    one, other = (_logits(each, trust_remote_code) for each in (first, second))
    if one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num()):
        return f"the same logits for {one.shape[1]} tokens, bit for bit"
    away = (one - other).abs().max().item() if one.shape == other.shape else float("inf")
    raise CheckpointError(f"{first.files.folder} and {second.files.folder} compute other logits: {away:.3g} apart")


def fits_in_memory(checkpoint: Checkpoint) -> bool:
    """Whether a model of this size can be loaded here, with as much again for what loading holds beside it."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * checkpoint.files.nbytes < free


def _by_place(checkpoint: Checkpoint) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for name, place in (*checkpoint.others.items(), *((name, name) for name in checkpoint.extra)):
        places.setdefault(place, []).append(name)
    tied = getattr(checkpoint.model, "all_tied_weights_keys", None) or {}
    return {place: names for place, names in places.items() if not (place in tied and tied[place] in places)}


def _of_pair(place: str, first: Checkpoint, mine: list[str], second: Checkpoint, yours: list[str]) -> Iterator[str]:
    if len(mine) != len(yours):
        yield f"{place} is stored as {len(mine)} tensors in the first, as {len(yours)} in the second"
        return
    for one, other in zip(mine, yours, strict=True):
        a, b = first.files.tensors[one], second.files.tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{place} is {a.dtype} {list(a.shape)} in the first, {b.dtype} {list(b.shape)} in the second"
        elif said := next(filter(None, map(_difference, _pieces(first, one), _pieces(second, other))), ""):
            yield f"{place} {said}"


def _pieces(checkpoint: Checkpoint, name: str) -> Iterable[Tensor]:
    return copied(checkpoint.files, name)


def _difference(one: Tensor, other: Tensor) -> str:
    """How two tensors differ, bits and not numbers: a NaN equals itself, and -0 is not 0."""
    if one.dtype != other.dtype:
        return f"is {one.dtype} in the first, {other.dtype} in the second"
    if one.shape != other.shape:
        return f"is {list(one.shape)} in the first, {list(other.shape)} in the second"
    bits, its = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    if torch.equal(bits, its):
        return ""
    away = (one.double() - other.double()).abs().max().item()
    return f"differs by up to {away:.3g}"


def _logits(checkpoint: Checkpoint, trust: bool) -> Tensor:
    model = _loaded(checkpoint, trust).eval()
    if checkpoint.parameters:
        model.set_experts_implementation("eager")  # torch's grouped products need sizes that not every model has
    words = model.config.get_text_config().vocab_size
    ids = torch.randint(words, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            return model(input_ids=ids).logits.float()  # type: ignore[no-any-return]
    except Exception as error:  # a model that takes other inputs than ids
        raise CheckpointError(f"{type(model).__name__} can't be run on ids alone: {error}") from error


def _loaded(checkpoint: Checkpoint, trust: bool) -> Any:
    """The model, by ``from_pretrained``; what it doesn't read is converted in memory to what it does."""
    layouts, reads = {*checkpoint.layouts.values()}, readable(checkpoint)
    tensors = None
    if layouts and not layouts <= {*reads}:
        tensors = {each.name: each.whole() for each in converted(checkpoint, reads[0])}
    return load_as_trained(checkpoint.files.folder, trust, tensors=tensors)
