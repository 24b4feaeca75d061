"""The tensors of a contract's sample: their names, copies of them, and the incoming gradient of a result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from veomni_ops.contract import Sample
from veomni_ops.many_values import MANY, spread, table


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in ``value``, which may be a tensor or nested tuples and lists, each with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{name}[{index}]")


def map_tensors(sample: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    """``sample`` with ``change`` applied once to each tensor. A tensor that occurs twice stays a single object."""
    changed: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]
        if isinstance(value, (tuple, list)):
            return type(value)(convert(item) for item in value)
        return value

    args = convert(sample.args)
    return replace(sample, args=args, kwargs={name: convert(value) for name, value in sample.kwargs.items()})


def overwrite(sample: Sample, source: Sample, through_data: bool = False) -> Sample:
    """Write the values of ``source`` into the tensors of ``sample`` in place, and return the call on them.

    Optimizers and data loaders write like this. ``through_data`` writes through ``.data``, as FSDP1 and DeepSpeed do,
    which does not raise autograd's version counters.
    """
    old = _distinct(sample)

    def write(new: Tensor) -> Tensor:
        tensor = next(old)
        with torch.no_grad():
            (tensor.data if through_data else tensor).copy_(new)
        return tensor

    return map_tensors(source, write)


def _distinct(sample: Sample) -> Iterator[Tensor]:
    tensors = (tensor for _, tensor in tensors_of((sample.args, tuple(sample.kwargs.values())), ""))
    return iter({id(tensor): tensor for tensor in tensors}.values())


def copy_of(sample: Sample) -> Sample:
    """A copy with new leaves of the same values, strides and offsets. Tensors that share memory still do so."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        key = memory.data_ptr() if memory.nbytes() else -id(tensor)  # all empty tensors have address 0
        with torch.no_grad():
            if key not in copies:
                copies[key] = tensor.as_strided((memory.nbytes() // tensor.element_size(),), (1,), 0).clone()
            place = copies[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return place.detach().requires_grad_(tensor.requires_grad)

    return map_tensors(sample, copy)


def to_float64(sample: Sample, device: torch.device | str = "cpu") -> Sample:
    """The inputs of the oracle: leaves on ``device`` with the same values, floating-point tensors in float64."""

    def convert(tensor: Tensor) -> Tensor:
        exact = tensor.detach().to(device)
        exact = exact.double() if exact.is_floating_point() else exact
        return exact.requires_grad_(tensor.requires_grad)

    return map_tensors(sample, convert)


def upstream_of(result: Tensor) -> Tensor:
    """The incoming gradient: fixed random values, the same for a kernel, the reference and the oracle."""
    draw = _drawn_once if result.numel() <= _SMALL else _drawn_lately if result.numel() <= MANY else _drawn
    return draw(result.shape, result.device).to(result.dtype, copy=True)


_SMALL = 2**16  # elements; a check asks for the same few small shapes thousands of times


def _drawn(shape: torch.Size, device: torch.device) -> Tensor:
    # Rounded to bf16 first, so that it has exactly the same values in every dtype.
    generator = torch.Generator().manual_seed(1)
    if shape.numel() > MANY:
        return spread(table(generator).bfloat16().to(device), shape)
    return torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().to(device)


# Kept where they are asked for: each copy from the CPU would wait for the GPU.
_drawn_once = functools.cache(_drawn)
_drawn_lately = functools.lru_cache(maxsize=4)(_drawn)
