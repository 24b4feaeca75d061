"""The whole weight of an output projection after its forward, where FSDP2 may have sharded it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def is_in_memory(weight: Tensor) -> bool:
    """Whether the weight's numbers are there: FSDP2 frees the memory of a weight that it shards again."""
    return not weight.numel() or weight.untyped_storage().size() > 0


@contextmanager
def gathered(head: nn.Module | None, weight: Tensor) -> Iterator[None]:
    """Gather ``weight`` if FSDP2 has sharded it again after the forward of ``head``, and shard it afterwards."""
    if is_in_memory(weight) or not isinstance(head, FSDPModule):
        yield
        return
    head.unshard()
    try:
        yield
    finally:
        head.reshard()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def outside_of_a_graph(head: Any, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """``compute()`` with the gathered weight, which is there again in the backward of its result.

    For a compiled step, whose head returns no tensor, so that FSDP2 has put none of its backward hooks on one.
    """
    with gathered(head, weight):
        result = compute()
    if result.requires_grad and not is_in_memory(weight):
        result.register_hook(lambda gradient: head.unshard())
    return result
