"""Slices a model's inputs into this rank's part, and keeps what a forward must know of the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from veomni_core.errors import ConfigError
from veomni_core.kernels import IGNORED
from veomni_transformers.sequence.exchange import ranks_of
from veomni_transformers.sequence.slicing import slice_input_tensor

# Bounds and lengths of the sequences in a packed batch. They describe the whole batch, so they are not sliced.
LENGTHS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
_NOT_CUT = LENGTHS | {"num_items_in_batch", "logits_to_keep"}


@dataclass
class WholeSequence:
    """What one forward needs to know of the whole sequence, beyond this rank's part of it.

    ``padding[B, S]`` and ``position_ids[B, S]`` are as the caller passed them. ``labels_here[B, S/n]`` are this rank's
    labels, already shifted. ``items`` is the number of labels on all ranks that are not ignored. ``loss_was_taken``
    becomes True when the model calls its loss function.
    """

    batch: int
    length: int
    padding: Tensor | None = None
    position_ids: Tensor | None = None
    labels_here: Tensor | None = None
    items: Tensor | None = None
    loss_was_taken: bool = False


def split_inputs(inputs: dict[str, Any], group: ProcessGroup) -> tuple[dict[str, Any], WholeSequence]:
    """This rank's part of a causal language model's keyword arguments, and what a forward must know of the whole.

    Every rank of the group passes the same whole batch. Labels are shifted before they are sliced, so that the last
    token of a part learns to predict the first token of the next part.

    Raises:
        ConfigError: the group's size doesn't divide the sequence length, a cache is requested, or it isn't known how to
            shard one of the inputs along the sequence.
    """
    inputs = {name: value for name, value in inputs.items() if value is not None}
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(tokens, Tensor):
        raise ConfigError("a sequence-parallel model needs input_ids or inputs_embeds as a tensor")
    whole = WholeSequence(*tokens.shape[:2])
    _check(inputs, whole.length, group)
    mine: dict[str, Any] = {}
    for name, value in inputs.items():
        if name in ("input_ids", "inputs_embeds", "labels"):
            mine[name] = slice_input_tensor(value, 1, group)
        elif name not in ("attention_mask", "position_ids", "shift_labels"):
            mine[name] = value
    positions = inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(whole.length, device=tokens.device).unsqueeze(0)
    elif len(positions.shape) == 2:
        whole.position_ids = positions
    mine["position_ids"] = slice_input_tensor(positions, -1, group)
    mask = inputs.get("attention_mask")
    if mask is None or len(mask.shape) == 2:
        # transformers builds its masks from the lengths it sees, so it gets a padding mask of the whole length.
        whole.padding = mask
        mask = torch.ones(whole.batch, whole.length, dtype=torch.bool, device=tokens.device) if mask is None else mask
    mine["attention_mask"] = mask
    labels = inputs.get("shift_labels")
    if labels is None and "labels" in inputs:
        labels = F.pad(inputs["labels"], (0, 1), value=IGNORED)[..., 1:]
    if labels is not None:
        whole.labels_here = slice_input_tensor(labels, 1, group).contiguous()
        whole.items = (labels != IGNORED).sum().clamp_min(1)
        mine.setdefault("labels", whole.labels_here)
    mine["use_cache"] = False
    return mine, whole


def check_positions(whole: WholeSequence) -> None:
    """Refuse padding without ``position_ids``, for a model that counts positions by its padding mask.

    Under sequence parallelism the model is given positions that count from 0 instead; with padding they would differ.
    Synchronises with the device.

    Raises:
        ConfigError: there is padding, and the caller passed no ``position_ids``.
    """
    if whole.padding is not None and whole.position_ids is None and not whole.padding.all():
        raise ConfigError(
            "this model counts positions by the tokens that its attention_mask keeps, which is not supported with "
            "sequence parallelism. Pass position_ids together with a mask that has padding"
        )


def _check(inputs: dict[str, Any], length: int, group: ProcessGroup) -> None:
    _, ranks, _ = ranks_of(group)
    if length % ranks:
        raise ConfigError(
            f"a sequence of {length} can't be split over {ranks} sequence-parallel ranks. Pad the batch to a "
            f"multiple of {ranks}, with labels of {IGNORED}, or choose another sequence length"
        )
    if inputs.get("past_key_values") is not None or inputs.get("use_cache"):
        raise ConfigError("a sequence-parallel model keeps no cache: call it without past_key_values and use_cache")
    keep = inputs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ConfigError("logits_to_keep counts from the sequence's end, which only one rank holds; leave it out")
    if inputs.get("ignore_index", IGNORED) != IGNORED:
        raise ConfigError(
            f"ignore_index={inputs['ignore_index']} is not supported with sequence parallelism, which counts the "
            f"labels itself: mark ignored labels with {IGNORED}, and leave ignore_index out"
        )
    cut = {"input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask"}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() > 0 and name not in cut | _NOT_CUT:
            raise ConfigError(
                f"sequence parallelism does not know how to shard the argument {name!r} along the sequence; call the "
                "model without it"
            )
        if name in cut and isinstance(value, dict):
            raise ConfigError(f"pass {name} as one tensor to a sequence-parallel model, not as a dict of tensors")
