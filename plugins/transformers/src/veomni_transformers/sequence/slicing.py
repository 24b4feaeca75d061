"""Slices tensors into one part per rank along the sequence, with padding to equal parts, and joins them again."""

from __future__ import annotations

from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from veomni_transformers.sequence.exchange import ranks_of


def slice_input_tensor(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of ``x`` along ``dim``: ``[.., S, ..] -> [.., S/n, ..]``, a view.

    Args:
        x: ``[.., S, ..]``, the same on every rank, of any dtype.
        dim: the dimension to split.
        group: the n ranks that share the sequence; all ranks without it.

    Returns:
        ``[.., S/n, ..]``, a view.

    Raises:
        ValueError: the group's size n doesn't divide S.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("fake", rank=1, world_size=4)  # stands for the second of four ranks
        >>> slice_input_tensor(torch.arange(8), dim=0)
        tensor([2, 3])
    """
    _, ranks, rank = ranks_of(group)
    length = x.shape[dim]
    if length % ranks:
        raise ValueError(
            f"a length of {length} can't be split over {ranks} ranks: pad it to a multiple (sp_pad_and_slice), or "
            "choose another sequence length"
        )
    return x.narrow(dim, rank * (length // ranks), length // ranks)


def sp_pad_and_slice(
    x: Tensor, dim: int = -1, pad_value: float = 0, pad_scale: int = 1, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's part of ``x`` after padding: ``[.., S, ..] -> [.., P/n, ..]``.

    P is S rounded up to a multiple of ``n * pad_scale``, so that every part is a multiple of ``pad_scale``; the
    padding is ``pad_value`` at the end. :func:`unpad_tensor` takes ``P - S`` off again.

    Args:
        x: ``[.., S, ..]``, the same on every rank, of any dtype.
        dim: the dimension to pad and split.
        pad_value: what is added at the end.
        pad_scale: every part's length is a multiple of this.
        group: the n ranks that share the sequence; all ranks without it.

    Returns:
        ``[.., P/n, ..]``.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("fake", rank=3, world_size=4)  # stands for the last of four ranks
        >>> sp_pad_and_slice(torch.arange(6), pad_value=-100)  # P is 8
        tensor([-100, -100])
        >>> sp_pad_and_slice(torch.arange(6), pad_value=-100, pad_scale=4)  # P is 16
        tensor([-100, -100, -100, -100])
    """
    _, ranks, _ = ranks_of(group)
    missing = -x.shape[dim] % (ranks * pad_scale)
    after = x.dim() - 1 - dim % x.dim()
    padded = F.pad(x, (0, 0) * after + (0, missing), value=pad_value) if missing else x
    return slice_input_tensor(padded, dim, group)


def unpad_tensor(x: Tensor, dim: int, padding_size: int) -> Tensor:
    """``x`` without the last ``padding_size`` of ``dim``: ``[.., P, ..] -> [.., P - padding_size, ..]``, a view.

    Args:
        x: ``[.., P, ..]``, of any dtype.
        dim: the padded dimension.
        padding_size: ``P - S``, the length of the padding.

    Returns:
        ``[.., S, ..]``, a view.

    Example:
        >>> import torch
        >>> logits = torch.zeros(1, 8, 64)  # of six positions, padded to eight
        >>> unpad_tensor(logits, dim=1, padding_size=2).shape
        torch.Size([1, 6, 64])
    """
    return x.narrow(dim, 0, x.shape[dim] - padding_size)


def gather_outputs(x: Tensor, gather_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Every rank's part, joined along ``gather_dim``: ``[.., S/n, ..] -> [.., S, ..]``. Takes no gradient.

    All ranks must hold parts of the same shape.

    Args:
        x: this rank's part ``[.., S/n, ..]``, of any dtype.
        gather_dim: the dimension to join.
        group: the n ranks that share the sequence; all ranks without it.

    Returns:
        ``[.., S, ..]``, the same on every rank.

    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=4)  # stands for the first of four ranks
        >>> logits = torch.zeros(2, 3, 64)  # of this rank's three positions
        >>> gather_outputs(logits, gather_dim=1).shape
        torch.Size([2, 12, 64])
    """
    group, ranks, _ = ranks_of(group)
    gather_dim %= x.dim()
    parts = x.new_empty(ranks, *x.shape)
    distributed.all_gather_into_tensor(parts, x.detach().unsqueeze(0).contiguous(), group=group)
    return parts.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)
