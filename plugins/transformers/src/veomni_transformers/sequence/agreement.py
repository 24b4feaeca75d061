"""Checks that the ranks of one group were given the same batch, before any input is sliced or refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from veomni_core.errors import HostError


def check_batches_agree(inputs: dict[str, Any], group: ProcessGroup) -> None:
    """Compare shapes and checksums of all model inputs over the ranks of ``group``.

    Every rank must get here before it refuses an input: a rank that raises earlier leaves the others waiting. The call
    synchronises with the device, and waits for the slowest rank.

    Raises:
        HostError: on every rank, with the names of the inputs that differ. Without it the ranks would train on parts
            of different sequences.
    """
    mine = {name: _described(value) for name, value in inputs.items() if value is not None}
    answers: list[Any] = [None] * group.size()
    distributed.all_gather_object(answers, mine, group=group)
    names = {name: None for answer in answers for name in answer}
    differing = [name for name in names if len({answer.get(name) for answer in answers}) > 1]
    if differing:
        raise HostError(
            f"the {len(answers)} ranks of one sequence-parallel group were given different batches (they differ in "
            f"{', '.join(differing)}); call the model with the same whole batch on each of them. Let the data loader "
            "shard by data-parallel group, not by process"
        )


def _is_plain(value: Any) -> bool:
    """Whether equal values have equal reprs on every rank: numbers, strings, and lists and dictionaries of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    return value is None or isinstance(value, int | float | str)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value) if _is_plain(value) else type(value).__name__
    rows = value.detach()
    wide = torch.float64 if rows.is_floating_point() else torch.int64
    if rows.dim() > 2:  # embeddings, or a 4-D mask: sum first, so as not to copy them in 64 bits
        rows = rows.sum(-1, dtype=wide)
    places = torch.arange(1, rows.numel() + 1, device=rows.device)
    return f"{tuple(value.shape)} {(rows.flatten() * places).sum(dtype=wide).item()}"
