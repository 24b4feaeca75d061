"""Ulysses sequence parallelism for any attention kernel; re-exported from veomni-core."""

from veomni_transformers.sequence import (
    apply_ulysses,
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    slice_input_tensor,
    sp_pad_and_slice,
    unpad_tensor,
)

__all__ = [
    "apply_ulysses",
    "gather_heads_scatter_seq",
    "gather_outputs",
    "gather_seq_scatter_heads",
    "slice_input_tensor",
    "sp_pad_and_slice",
    "unpad_tensor",
]
