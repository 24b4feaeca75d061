"""Slices a model's inputs into this rank's part, and keeps what a forward must know of the whole sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.errors import ConfigError
from veomni_core.kernels import IGNORED
from veomni_transformers.sequence.order import Order

# Bounds and lengths of the sequences in a packed batch. They describe the whole batch, so they are not sliced.
LENGTHS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
_NOT_CUT = LENGTHS | {"num_items_in_batch", "logits_to_keep"}
# DeepStack: features of a tower's early layers, one row per picture's position, which decoder layers add there.
_PICTURES, _ROWS = "visual_pos_masks", "deepstack_visual_embeds"
_BY_POSITION = frozenset({"input_ids", "inputs_embeds", "labels", _PICTURES})
_CUT = _BY_POSITION | {"attention_mask", "position_ids", _ROWS}
# Of a decoder's arguments those that hold no tensors of positions.
_SETTINGS = frozenset({"past_key_values", "use_cache", "cache_position", "return_dict", "kwargs"})


@dataclass
class WholeSequence:
    """What one forward needs to know of the whole sequence, beyond this rank's part of it.

    ``padding[B, S]`` and ``position_ids[B, S]`` are as the caller passed them. ``labels[B, S]`` are shifted, and
    ``labels_here[B, S/n]`` this rank's. ``items`` is the number of labels on all ranks that are not ignored.
    ``loss_was_taken`` becomes True when the model calls its loss function. ``is_cut`` is True while this rank's part
    alone is computed. ``angles`` are pairs of ``cos`` and ``sin``, this rank's and those of all positions.
    ``documents`` is the mask of ring attention.
    """

    batch: int
    length: int
    padding: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None
    labels_here: Tensor | None = None
    items: Tensor | None = None
    loss_was_taken: bool = False
    is_cut: bool = False
    angles: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    documents: Any = None


def whole_inputs(inputs: dict[str, Any], order: Order) -> tuple[dict[str, Any], WholeSequence]:
    """A model's keyword arguments without labels that are shifted already, and what its losses must know of the whole.

    Every rank of the group passes the same whole batch. Labels are shifted before they are sliced, so that the last
    token of a part learns to predict the first token of the next part.

    Raises:
        ConfigError: the group's size doesn't divide the sequence length, a cache is requested, or another argument that
            one rank can't follow.
    """
    inputs = {name: value for name, value in inputs.items() if value is not None}
    whole = WholeSequence(*_tokens(inputs).shape[:2])
    _check(inputs, whole.length, order)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        whole.padding = mask
    labels = inputs.pop("shift_labels", None)
    if labels is None and "labels" in inputs:
        labels = F.pad(inputs["labels"], (0, 1), value=IGNORED)[..., 1:]
    if labels is not None:
        whole.labels, whole.labels_here = labels, order.part(labels, 1).contiguous()
        whole.items = (labels != IGNORED).sum().clamp_min(1)
        inputs.setdefault("labels", labels)
    return inputs, whole


def part_of(inputs: dict[str, Any], whole: WholeSequence, order: Order) -> dict[str, Any]:
    """This rank's part of the keyword arguments of a decoder, which may be the model itself.

    Positions are cut from those of the whole sequence, of one row or of several (``[3, B, S]`` of pictures, or
    ``[4, B, S]`` with the text's first). ``whole`` gets padding and the text's positions.

    Raises:
        ConfigError: it isn't known how to shard one of the inputs along the sequence.
    """
    inputs = {name: value for name, value in inputs.items() if value is not None}
    tokens = _tokens(inputs)
    if tokens.shape[:2] != (whole.batch, whole.length):
        raise ConfigError(
            f"the decoder is given {tuple(tokens.shape[:2])} tokens of a batch of {(whole.batch, whole.length)}; with "
            "sequence parallelism every position of the batch must be one of the decoder's"
        )
    for name, value in inputs.items():
        if name not in _CUT | _NOT_CUT and _holds_tensors(value):
            raise ConfigError(
                f"sequence parallelism does not know how to shard the argument {name!r} along the sequence; call the "
                "model without it"
            )
        if name in _BY_POSITION | {"position_ids"} and not isinstance(value, Tensor):
            raise ConfigError(f"pass {name} as one tensor to a sequence-parallel model, not as {type(value).__name__}")
    mine = {name: order.part(v, 1) if name in _BY_POSITION else v for name, v in inputs.items()}
    positions = inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(whole.length, device=tokens.device).unsqueeze(0)
    else:
        of_text = positions[0] if positions.dim() == 3 and len(positions) == 4 else positions
        whole.position_ids = of_text if of_text.dim() == 2 else None
    mine["position_ids"] = order.part(positions, -1)
    mask = inputs.get("attention_mask")
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        # transformers builds its masks from the lengths it sees, so it gets a padding mask of the whole length.
        whole.padding = mask
        mask = torch.ones(whole.batch, whole.length, dtype=torch.bool, device=tokens.device) if mask is None else mask
    mine["attention_mask"] = mask
    if _ROWS in inputs:
        pictures = inputs[_PICTURES]
        numbers = torch.full(pictures.shape, -1, device=pictures.device)
        numbers[pictures] = torch.arange(int(pictures.sum()), device=pictures.device)
        kept = order.part(numbers, 1)
        mine[_ROWS] = [rows[kept[kept >= 0]] for rows in inputs[_ROWS]]
    mine["use_cache"] = False
    return mine


def unknown_arguments(names: Iterable[str]) -> list[str]:
    """Of a decoder's arguments those that may hold tensors of which it isn't known how to shard them."""
    known = _CUT | _NOT_CUT | _SETTINGS
    return [name for name in names if name not in known and not name.startswith("output_")]


def _tokens(inputs: dict[str, Any]) -> Tensor:
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(tokens, Tensor):
        raise ConfigError("a sequence-parallel model needs input_ids or inputs_embeds as a tensor")
    return tokens


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(_holds_tensors(each) for each in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and value.dim() > 0


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


def _check(inputs: dict[str, Any], length: int, order: Order) -> None:
    if length % order.multiple:
        raise ConfigError(
            f"a sequence of {length} can't be split over {order.group.size()} sequence-parallel ranks. Pad the batch "
            f"to a multiple of {order.multiple}, with labels of {IGNORED}, or choose another sequence length"
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
