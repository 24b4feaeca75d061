"""Where the documents of one packed sequence begin and end, in the form in which attention by lengths is given it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def boundaries(position_ids: Tensor) -> dict[str, Any]:
    """The arguments of a model's forward that tell it where documents are packed, read off positions that restart.

    Besides attention, convolutions, delta rules and scans that kernels are bound to read them.

    Args:
        position_ids: ``[1, S]``, 0 where a document begins.

    Returns:
        ``cu_seq_lens_q`` and ``cu_seq_lens_k``: int32, 0 and then where each document ends. ``max_length_q`` and
        ``max_length_k``: the longest document's length.

    Raises:
        ValueError: the batch has several rows, each with boundaries of its own.

    Example:
        >>> boundaries(torch.tensor([[0, 1, 2, 0, 1]]))["cu_seq_lens_q"]
        tensor([0, 3, 5], dtype=torch.int32)
    """
    rows, length = position_ids.shape
    if rows != 1:
        raise ValueError(f"a batch of {rows} packed sequences has boundaries for each; they can be given for one")
    begins = position_ids[0].eq(0).nonzero().flatten()
    bounds = torch.cat([begins, begins.new_tensor([length])])
    longest = int(bounds.diff().max())
    ends = bounds.to(torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
