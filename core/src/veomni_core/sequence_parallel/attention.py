"""Any attention kernel over a whole sequence of which each rank holds a part: Ulysses.

The wrapper exchanges sequence for heads, runs the kernel that was chosen on this rank's heads, and exchanges back. It
keeps nothing between calls, so a layer may be recomputed in backward (gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from veomni_core.errors import ConfigError
from veomni_core.sequence_parallel.exchange import gather_heads_scatter_seq, scatter_attention_heads
from veomni_core.sequence_parallel.inputs import LENGTHS, WholeSequence
from veomni_core.sequence_parallel.slicing import slice_input_tensor

Attention = Callable[..., Any]
# What kernels take of each head, besides query, key and value.
_PER_HEAD = "s_aux"
# They count this rank's positions alone, while the mask has what a kernel may need of them; or they are the loss's.
_NOT_PASSED = frozenset({"position_ids", "cache_position", "num_items_in_batch"})


@dataclass(frozen=True)
class HeadShare:
    """What a kernel reads of the attention module, for the heads of one rank."""

    num_key_value_groups: int
    is_causal: bool
    training: bool
    config: Any
    layer_idx: int | None


def ulysses_attention(kernel: Attention, group: ProcessGroup) -> Attention:
    """``kernel``, given and giving this rank's part of the sequence: ``query[B, Hq, S/n, D] -> [B, S/n, Hq, Dv]``.

    The mask is that of the whole sequence, and so are ``cu_seq_lens_q`` and ``cu_seq_lens_k``; sinks (``s_aux[Hq]``)
    are those of all heads.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        options = _shared_options(options, group)
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
            attention_mask = slice_input_tensor(attention_mask, 1, group)
        query, key, value = scatter_attention_heads(query, key, value, group)
        share = HeadShare(
            num_key_value_groups=query.shape[1] // key.shape[1],
            is_causal=getattr(module, "is_causal", True),
            training=module.training,
            config=getattr(module, "config", None),
            layer_idx=getattr(module, "layer_idx", None),
        )
        output, _ = kernel(share, query, key, value, attention_mask, **options)
        return gather_heads_scatter_seq(output, head_dim=2, seq_dim=1, group=group), None

    return attend


def _shared_options(options: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    if options.get("output_attentions"):
        raise ConfigError("sequence-parallel attention gives no weights; leave out output_attentions")
    if options.get("dropout"):
        raise ConfigError(
            f"sequence-parallel attention can't drop out, and {options['dropout']} was asked for: ranks with equal "
            "seeds would drop the same of their different heads. Build the model with an attention dropout of 0"
        )
    shared = {name: value for name, value in options.items() if name not in _NOT_PASSED}
    for name, value in shared.items():
        if name == _PER_HEAD and value is not None:
            shared[name] = slice_input_tensor(value, 0, group)
        elif isinstance(value, Tensor) and name not in LENGTHS:
            raise ConfigError(f"sequence-parallel attention does not know how {name} belongs to heads and positions")
    return shared


def whole_mask(build: Callable[..., Any], whole: Callable[[], WholeSequence], *, reads_positions: bool) -> Attention:
    """transformers' mask function ``build``, asked for the mask of the whole sequence.

    transformers calls it with lengths, padding and packing of what the rank holds; ``whole`` tells those of all.
    ``reads_positions`` is whether the mask keeps packed sequences apart, rather than the kernel by ``cu_seq_lens``.
    """
    from transformers.masking_utils import and_masks, find_packed_sequence_indices, packed_sequence_mask_function

    def mask(**call: Any) -> Any:
        if call.get("use_vmap"):
            raise ConfigError(
                "this model adds a mask of its own, over positions that one rank doesn't hold; it can't run "
                "sequence-parallel"
            )
        sequence = whole()
        length: dict[str, Any] = {"q_length": sequence.length}
        if "cache_position" in call:  # transformers before 5.6 names the queries one by one
            length = {"cache_position": torch.arange(sequence.length, device=call["cache_position"].device)}
        call |= {**length, "kv_length": sequence.length, "attention_mask": _as_bool(sequence.padding)}
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


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.to(torch.bool)


def packing_of(whole: WholeSequence) -> dict[str, Tensor]:
    """``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int32, ``[sequences + 1]``) of a batch of one whose positions restart.

    Empty where transformers wouldn't look at positions: of several rows, without ``position_ids``, or with padding.
    Waits for the device, as the number of sequences is data; handing ``cu_seq_lens`` to the model avoids that.
    """
    if whole.batch != 1 or whole.position_ids is None:
        return {}
    if whole.padding is not None and not whole.padding.all():
        return {}
    flat = whole.position_ids.flatten()
    starts = torch.nonzero(torch.diff(flat, prepend=flat[:1] - 2) != 1).flatten()
    bounds = torch.cat([starts, starts.new_tensor([flat.numel()])]).int()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
