"""Checks the packed-sequence arguments (``cu_seq_lens``) of an attention call."""

from __future__ import annotations

from torch import Tensor

from veomni_core.errors import ConfigError


def packing(query: Tensor, of_queries: Tensor | None, of_keys: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The ``cu_seq_lens`` of queries and keys; ``None`` if the sequences are not packed.

    Args:
        query: ``[B, ...]``.
        of_queries: ``cu_seq_lens_q``, ``[sequences + 1]``, or None.
        of_keys: ``cu_seq_lens_k``, ``[sequences + 1]``, or None.

    Raises:
        ConfigError: only one of the two is given, or the batch size is not 1.
    """
    if of_queries is None and of_keys is None:
        return None
    if of_queries is None or of_keys is None:
        missing = "cu_seq_lens_q" if of_queries is None else "cu_seq_lens_k"
        raise ConfigError(f"packed sequences need cu_seq_lens_q and cu_seq_lens_k; {missing} is missing")
    if query.shape[0] != 1:
        raise ConfigError(f"packed sequences need batch size 1, this batch has {query.shape[0]}; join its rows")
    return of_queries, of_keys
