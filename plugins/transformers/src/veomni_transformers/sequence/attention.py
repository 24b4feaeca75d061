"""Ulysses: runs any attention kernel over a whole sequence of which each rank holds a part.

The wrapper exchanges sequence for heads, runs the chosen kernel on this rank's heads, and exchanges back. It keeps no
state between calls, so a layer may be recomputed in backward (gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from veomni_core.errors import ConfigError
from veomni_transformers.packed.boundaries import BOUNDS_OF_ROWS, OF_THE_WHOLE
from veomni_transformers.sequence.exchange import gather_heads_scatter_seq, scatter_attention_heads
from veomni_transformers.sequence.inputs import LENGTHS, WholeSequence
from veomni_transformers.sequence.slicing import slice_input_tensor

Attention = Callable[..., Any]
# The attention sinks `[Hq]`: the only option with one value per head.
_PER_HEAD = "s_aux"
# Not forwarded: `position_ids` and `cache_position` are rank-local (the global mask covers them);
# `num_items_in_batch` belongs to the loss.
_NOT_PASSED = frozenset(
    {"position_ids", "cache_position", "num_items_in_batch", "seq_idx", BOUNDS_OF_ROWS, OF_THE_WHOLE}
)


@dataclass(frozen=True)
class HeadShare:
    """Stands for the attention module in a kernel's call: the attributes that kernels read, for one rank's heads."""

    num_key_value_groups: int
    is_causal: bool
    training: bool
    config: Any
    layer_idx: int | None


def ulysses_attention(kernel: Attention, group: ProcessGroup | None, *, exchanges: bool = True) -> Attention:
    """Wrap ``kernel`` for inputs and an output that are this rank's part of the sequence.

    ``query[B, Hq, S/n, D] -> [B, S/n, Hq, Dv]``. The mask, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` must be those of the
    whole sequence, and the sinks (``s_aux[Hq]``) those of all heads. Without ``exchanges`` queries, keys and values
    are those of the whole sequence and this rank's heads already, and so is the output. Without ``group`` a rank
    computes all heads.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        options = _shared_options(options, group)
        if group and isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
            attention_mask = slice_input_tensor(attention_mask, 1, group)
        if group and exchanges:
            query, key, value = scatter_attention_heads(query, key, value, group)
        share = HeadShare(
            num_key_value_groups=query.shape[1] // key.shape[1],
            is_causal=getattr(module, "is_causal", True),
            training=module.training,
            config=getattr(module, "config", None),
            layer_idx=getattr(module, "layer_idx", None),
        )
        output, _ = kernel(share, query, key, value, attention_mask, **options)
        if not group or not exchanges:
            return output, None
        return gather_heads_scatter_seq(output, head_dim=2, seq_dim=1, group=group), None

    return attend


def _shared_options(options: dict[str, Any], group: ProcessGroup | None) -> dict[str, Any]:
    if options.get("output_attentions"):
        raise ConfigError("sequence-parallel attention returns no attention weights; leave out output_attentions")
    if options.get("dropout"):
        raise ConfigError(
            f"attention dropout ({options['dropout']}) is not supported with sequence parallelism: ranks with equal "
            "seeds would draw the same mask for their different heads. Build the model with an attention dropout of 0"
        )
    options = {**options, **options.get(OF_THE_WHOLE, {})}
    shared = {name: value for name, value in options.items() if name not in _NOT_PASSED}
    for name, value in shared.items():
        if name == _PER_HEAD and value is not None:
            shared[name] = slice_input_tensor(value, 0, group) if group else value
        elif isinstance(value, Tensor) and name not in LENGTHS:
            raise ConfigError(
                f"sequence parallelism does not know how to shard the attention argument {name!r} over heads and "
                "positions; call the model without it"
            )
    return shared


def whole_mask(build: Callable[..., Any], whole: Callable[[], WholeSequence], *, reads_positions: bool) -> Attention:
    """Wrap transformers' mask function ``build``, so that it builds the mask of the whole sequence.

    In the decoder transformers calls it with the lengths, padding and packing of this rank's part; ``whole`` returns
    the whole sequence's. Outside, where Gemma 3 builds its masks, it is called with those. ``reads_positions``: packed
    sequences are kept apart by the mask, not by the kernel's ``cu_seq_lens``.
    """
    from transformers.masking_utils import and_masks, find_packed_sequence_indices, packed_sequence_mask_function

    def mask(**call: Any) -> Any:
        sequence = whole()
        if not sequence.is_cut:
            return build(**call)
        if call.get("use_vmap"):
            raise ConfigError(
                "this model adds its own mask function, which needs positions that one rank doesn't hold; it can't run "
                "sequence-parallel"
            )
        length: dict[str, Any] = {"q_length": sequence.length}
        if "cache_position" in call:  # transformers before 5.6 passes each query's position, not their number
            length = {"cache_position": torch.arange(sequence.length, device=call["cache_position"].device)}
        padding = None if sequence.padding is None else sequence.padding.to(torch.bool)
        call |= {**length, "kv_length": sequence.length, "attention_mask": padding}
        if reads_positions and sequence.position_ids is not None and sequence.padding is None:
            packed = find_packed_sequence_indices(sequence.position_ids.expand(call["batch_size"], -1))
            if packed is not None:
                keep_apart = packed_sequence_mask_function(packed)
                call |= {
                    "mask_function": and_masks(call["mask_function"], keep_apart),
                    "allow_is_causal_skip": False,
                }
        return build(**call)

    return mask


def packing_of(whole: WholeSequence) -> dict[str, Tensor]:
    """``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int32, ``[sequences + 1]``) of a batch of one whose positions restart.

    Empty where transformers would not look at positions: with several rows, without ``position_ids``, or with padding.
    Synchronises with the device, since the number of sequences depends on the data. Callers who pass ``cu_seq_lens`` to
    the model avoid that.
    """
    if whole.batch != 1 or whole.position_ids is None:
        return {}
    if whole.padding is not None and not whole.padding.all():
        return {}
    flat = whole.position_ids.flatten()
    starts = torch.nonzero(torch.diff(flat, prepend=flat[:1] - 2) != 1).flatten()
    bounds = torch.cat([starts, starts.new_tensor([flat.numel()])]).int()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
