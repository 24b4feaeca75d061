"""The rows of a sample, where its contract names the inputs that have some: a call on any of them is a sample too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from veomni_conformance.sample_tensors import map_tensors
from veomni_ops.contract import Sample


def count_rows(rows: tuple[str, ...], inputs: Mapping[str, Tensor]) -> int:
    """How many rows a sample has; 0 if none of its calls on fewer rows would be legal.

    Args:
        rows: the contract's ``rows``.
        inputs: the sample's tensors by name.
    """
    tensors = [inputs[name] for name in rows if name in inputs]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim() > 1}
    # An input of one row may serve all rows, as angles that a batch shares. One without rows ends the search.
    if not sizes or any(not tensor.dim() for tensor in tensors) or len(sizes - {1}) > 1:
        return 0
    count = max(sizes) if sizes - {1} else 1
    # Of one dimension: a number per row, as labels. Where no tensor has more dimensions, that one is a row's width.
    return count if all(tensor.shape[0] == count for tensor in tensors if tensor.dim() == 1) else 0


def select_rows(rows: tuple[str, ...], inputs: Mapping[str, Tensor], sample: Sample, chosen: Sequence[int]) -> Sample:
    """The call on some rows of ``sample``, in the order of ``chosen``. Tensors that are leaves stay leaves."""
    count = count_rows(rows, inputs)
    cut = {id(inputs[name]) for name in rows if name in inputs and inputs[name].shape[0] == count}

    def select(tensor: Tensor) -> Tensor:
        if id(tensor) not in cut:
            return tensor
        return tensor.detach()[list(chosen)].requires_grad_(tensor.requires_grad)

    return map_tensors(sample, select)
