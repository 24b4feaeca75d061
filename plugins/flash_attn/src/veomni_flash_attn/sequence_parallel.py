"""Ulysses sequence parallelism, which runs any attention kernel; it lives in veomni-core, where every kernel can use it."""

from veomni_core.sequence_parallel import (
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
