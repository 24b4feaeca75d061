"""The tensors of a contract's sample, their float64 copies, and what is sent back through a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from veomni_core.ops.contract import Sample


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{name}[{index}]")


def to_float64(sample: Sample) -> Sample:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            exact = value.detach().cpu()
            exact = exact.double() if exact.is_floating_point() else exact
            return exact.requires_grad_(value.requires_grad)
        if isinstance(value, (tuple, list)):
            return type(value)(convert(item) for item in value)
        return value

    kwargs = {name: convert(value) for name, value in sample.kwargs.items()}
    return Sample(sample.name, convert(sample.args), kwargs, sample.needs)


def upstream_of(result: Tensor) -> Tensor:
    """The incoming gradient: fixed random values, the same for a kernel, the reference and the oracle."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    # Rounded to bf16 first, so that every dtype is sent exactly the same.
    return values.bfloat16().to(result.device, result.dtype)
