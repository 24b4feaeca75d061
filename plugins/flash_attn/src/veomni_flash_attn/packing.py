"""What a call says of packed sequences, checked."""

from __future__ import annotations

from torch import Tensor


def packing(query: Tensor, of_queries: Tensor | None, of_keys: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Where the sequences in ``query`` ``[B, ...]`` and its keys begin and end; ``None`` where it isn't said.

    Raises:
        ValueError: only one of them is given, or the batch is not of one.
    """
    if of_queries is None and of_keys is None:
        return None
    if of_queries is None or of_keys is None:
        missing = "cu_seq_lens_q" if of_queries is None else "cu_seq_lens_k"
        raise ValueError(f"packed sequences need cu_seq_lens_q and cu_seq_lens_k; {missing} is missing")
    if query.shape[0] != 1:
        raise ValueError(f"packed sequences come in a batch of one, this one has {query.shape[0]}")
    return of_queries, of_keys
