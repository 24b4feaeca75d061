"""Counts what a rank sends to other ranks by all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that leave this rank while it is entered, in backward too. For groups of all ranks.

    Two ways lead to an all-to-all: ``torch.distributed.all_to_all_single``, and the functional collectives, which the
    engine uses. The sizes of messages (a few counts) are among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d.alltoall_base_"):  # output, input, group, output splits, input splits
            self._add(args[1], args[4])
        elif name.startswith("_c10d_functional.all_to_all_single"):  # input, output splits, input splits, group
            self._add(args[0], args[2])
        return func(*args, **(kwargs or {}))

    def _add(self, rows: Tensor, splits: Sequence[int]) -> None:
        everyone = rows.numel() * rows.element_size()
        ranks = distributed.get_world_size()
        parts = list(splits) or [1] * ranks
        kept = parts[distributed.get_rank()] / max(1, sum(parts))
        self.bytes += round(everyone * (1 - kept))
        self.calls += 1
