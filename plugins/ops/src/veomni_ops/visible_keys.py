"""Which keys each query may see: bools ``[B, T, S]``, or int32 ranges ``[B, T, 2]``, the first and the end."""

from __future__ import annotations

import torch
from torch import Tensor


def as_mask(visible: Tensor, keys: int) -> Tensor:
    """``visible`` in its form of bools ``[B, T, S]``, of ``S = keys``.

    Example:
        >>> as_mask(torch.tensor([[[0, 1], [1, 3], [2, 2]]], dtype=torch.int32), 3).int()
        tensor([[[1, 0, 0],
                 [0, 1, 1],
                 [0, 0, 0]]], dtype=torch.int32)
    """
    if visible.dtype == torch.bool:
        return visible
    places = torch.arange(keys, device=visible.device)
    return (places >= visible[..., :1]) & (places < visible[..., 1:])


def check_visible(op_name: str, visible: Tensor, rows: tuple[int, ...], keys: int) -> None:
    """Check that ``visible`` fits to queries ``[B, T]``, the ``rows``, and so many keys.

    Raises:
        ValueError: it does not.

    Example:
        >>> check_visible("dsa_indexer", torch.ones(1, 4, 6, dtype=torch.bool), (1, 4), 6)
    """
    if (visible.dtype, tuple(visible.shape)) not in ((torch.bool, (*rows, keys)), (torch.int32, (*rows, 2))):
        found = f"{visible.dtype} {list(visible.shape)}"
        raise ValueError(f"{op_name}: visible is {found}; give bool {[*rows, keys]} or int32 {[*rows, 2]}")


def causal_ranges(batch: int, queries: int, keys: int, lengths: tuple[int, ...] = ()) -> Tensor:
    """``visible`` as ranges ``[B, T, 2]`` of causal rows: the last queries see the last keys, packed in ``lengths``.

    Example:
        >>> causal_ranges(1, 3, 3, (1, 2)).tolist()
        [[[0, 1], [1, 2], [1, 3]]]
    """
    stops = torch.arange(1, queries + 1) + keys - queries
    sizes = torch.tensor(lengths or (keys,))
    begins = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)[keys - queries :]
    return torch.stack([begins, stops], dim=-1).to(torch.int32).expand(batch, -1, -1).contiguous()
