"""Slices tensors into one part per rank along the sequence, with padding to equal parts, and joins them again."""

from __future__ import annotations

from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from veomni_core.parallel.sequence.exchange import ranks_of


def slice_input_tensor(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of ``x`` along ``dim``: ``[.., S, ..] -> [.., S/n, ..]``, a view.

    Raises:
        ValueError: the group's size n doesn't divide S.
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
    """
    _, ranks, _ = ranks_of(group)
    missing = -x.shape[dim] % (ranks * pad_scale)
    after = x.dim() - 1 - dim % x.dim()
    padded = F.pad(x, (0, 0) * after + (0, missing), value=pad_value) if missing else x
    return slice_input_tensor(padded, dim, group)


def unpad_tensor(x: Tensor, dim: int, padding_size: int) -> Tensor:
    """``x`` without the last ``padding_size`` of ``dim``: ``[.., P, ..] -> [.., P - padding_size, ..]``, a view."""
    return x.narrow(dim, 0, x.shape[dim] - padding_size)


def gather_outputs(x: Tensor, gather_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Every rank's part, joined along ``gather_dim``: ``[.., S/n, ..] -> [.., S, ..]``. Takes no gradient.

    All ranks must hold parts of the same shape.
    """
    group, ranks, _ = ranks_of(group)
    gather_dim %= x.dim()
    parts = x.new_empty(ranks, *x.shape)
    distributed.all_gather_into_tensor(parts, x.detach().unsqueeze(0).contiguous(), group=group)
    return parts.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)
