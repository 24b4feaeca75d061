"""The former home of :mod:`veomni_transformers.sequence`; goes with the next release."""

from veomni_core.moved_names import moved

_MOVED = (
    *("SequenceParallel", "apply_ulysses", "gather_heads_scatter_seq", "gather_outputs", "gather_seq_scatter_heads"),
    *("scatter_attention_heads", "slice_input_tensor", "sp_pad_and_slice", "unpad_tensor"),
)
__getattr__ = moved(__name__, {"veomni_transformers.sequence": _MOVED})
