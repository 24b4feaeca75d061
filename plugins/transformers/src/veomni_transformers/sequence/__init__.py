"""Ulysses and ring attention: each rank runs a model on its part of the sequence, exact in loss and gradients.

Around each attention the ranks exchange positions for heads (DeepSpeed-Ulysses, arXiv 2309.14509), so any attention
kernel computes the whole sequence for some of the heads; so they do around delta rules and scans of Mamba 2.
:func:`apply_ulysses` does that to one bound model. By :func:`apply_context_parallel` keys and values of attention
travel round a ring of ranks instead. The other functions are its building blocks, for models that need
their own arrangement.
"""

from veomni_transformers.sequence.exchange import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    scatter_attention_heads,
)
from veomni_transformers.sequence.slicing import gather_outputs, slice_input_tensor, sp_pad_and_slice, unpad_tensor
from veomni_transformers.sequence.ulysses import SequenceParallel, apply_context_parallel, apply_ulysses

__all__ = [
    "SequenceParallel",
    "apply_context_parallel",
    "apply_ulysses",
    "gather_heads_scatter_seq",
    "gather_outputs",
    "gather_seq_scatter_heads",
    "scatter_attention_heads",
    "slice_input_tensor",
    "sp_pad_and_slice",
    "unpad_tensor",
]
