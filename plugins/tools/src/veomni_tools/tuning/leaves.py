"""Arguments as leaves: the same values without their history, so that each run has a graph of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor
from transformers.utils.generic import ModelOutput

from veomni_ops.contract import dtype_name


def as_leaves(value: Any) -> Any:
    """``value`` with its tensors as leaves; those that required gradients still do. Runs don't write into them."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: as_leaves(each) for name, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(map(as_leaves, value))
    return {name: as_leaves(each) for name, each in value.items()} if type(value) is dict else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def form_of(value: Any) -> Hashable:
    """What of ``value`` times depend on, for equal calls to be measured once: shapes, dtypes, strides, and settings."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.stride(), value.requires_grad)
    if isinstance(value, (tuple, list)):
        return tuple(map(form_of, value))
    if isinstance(value, dict):
        return tuple((name, form_of(each)) for name, each in value.items())
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def shapes_of(value: Any) -> str:
    """The shapes and dtypes in ``value``, for people: ``[4, 4096, 2048] bfloat16``; equal ones once."""
    shapes = [f"{list(each.shape)} {dtype_name(each.dtype)}" for each in tensors_in(value)]
    return ", ".join(dict.fromkeys(shapes))
