"""Whether the ranks of one group were given the same batch, asked before anything is cut or raised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from veomni_core.errors import HostError


def check_batches_agree(inputs: dict[str, Any], group: ProcessGroup) -> None:
    """Compare shapes and checksums of all that the model is called with, over the ranks of ``group``.

    Every rank must reach this: a rank that refuses its input on its own leaves the others waiting. It waits for the
    device, and for the slowest rank.

    Raises:
        HostError: on every rank, with what differs; they would train on a sequence that nobody wrote.
    """
    mine = {name: _described(value) for name, value in inputs.items() if value is not None}
    answers: list[Any] = [None] * group.size()
    distributed.all_gather_object(answers, mine, group=group)
    names = {name: None for answer in answers for name in answer}
    differing = [name for name in names if len({answer.get(name) for answer in answers}) > 1]
    if differing:
        raise HostError(
            f"the {len(answers)} ranks of one sequence-parallel group were given different batches (they differ in "
            f"{', '.join(differing)}); each must call the model with the same whole sequence. Let the data loader "
            "count data-parallel groups, not processes"
        )


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value) if isinstance(value, int | float | str) else type(value).__name__
    rows = value.detach()
    wide = torch.float64 if rows.is_floating_point() else torch.int64
    if rows.dim() > 2:  # embeddings, or a mask of queries and keys: no second copy of them in 64 bits
        rows = rows.sum(-1, dtype=wide)
    places = torch.arange(1, rows.numel() + 1, device=rows.device)
    return f"{tuple(value.shape)} {(rows.flatten() * places).sum(dtype=wide).item()}"
