"""The functions that a sequence-parallel model runs: its forward on a part of the sequence, and its losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.errors import BindingError
from veomni_transformers.attention.config_changes import interface_of
from veomni_transformers.proving.functions import current_forward
from veomni_transformers.sequence.agreement import check_batches_agree
from veomni_transformers.sequence.attention import packing_of
from veomni_transformers.sequence.inputs import WholeSequence, check_positions, part_of, whole_inputs
from veomni_transformers.sequence.losses import sum_over_ranks, whole_sequence
from veomni_transformers.sequence.mixers import padding_builders, refuse_padding
from veomni_transformers.sequence.order import Order
from veomni_transformers.sequence.recurrence import handed_down
from veomni_transformers.sequence.refusals import reads_positions_from_mask
from veomni_transformers.sequence.ring import documents

# Arguments of towers, which transformers' models pass on to their decoder too, where nothing reads them.
_OF_TOWERS = ("image_", "video_", "audio_")


class RunningForward:
    """What a sequence-parallel model's functions share: its ranks, and the sequence of the forward that is running.

    It has no reference to a model. So transformers' tables may hold it, and deep copies of the model share it.
    """

    def __init__(self, order: Order) -> None:
        self.order, self.group = order, order.group
        self.sequence: WholeSequence | None = None
        self.batches_agree = False

    def whole(self) -> WholeSequence:
        """The whole sequence, of which this rank runs its part.

        Raises:
            BindingError: no forward of the whole model is running.
        """
        if self.sequence is None:
            raise BindingError(
                "a submodule of a sequence-parallel model was called on its own, outside of the model that "
                "apply_ulysses was given: call that model"
            )
        return self.sequence


def whole_forward(model: nn.Module, running: RunningForward, config_at: str, interface: str) -> Callable[..., Any]:
    """A forward for ``model`` that is given a whole batch, around the decoder of :func:`split_forward`.

    What runs outside of that decoder (towers that can't be divided, and what puts features among those of words)
    computes the whole on every rank. So each position's features have a gradient on one rank, and the ranks' mean is
    that of one process.

    Args:
        model: the model whose forward it replaces.
        running: what the model's functions share.
        config_at: the path of the module whose config selects the attention.
        interface: what that config must name; otherwise the forward raises.
    """
    original = current_forward(model)
    names = _arguments(original)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_attention(self, config_at, interface)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not running.batches_agree and not torch.compiler.is_compiling():
            check_batches_agree(given, running.group)
            running.batches_agree = True
        inputs, whole = whole_inputs(given, running.order)
        running.sequence = whole
        try:
            output = original(self, **inputs)
        finally:
            running.sequence = None
        if whole.labels_here is not None and not whole.loss_was_taken:
            raise BindingError(
                f"{type(self).__name__} computes its loss itself instead of calling its loss_function, so the loss "
                "can't be computed over all ranks"
            )
        return output

    return forward


def split_forward(
    decoder: nn.Module, running: RunningForward, by_lengths: bool, of: nn.Module, mixes: bool
) -> Callable[..., Any]:
    """A forward for ``decoder`` that is given a whole batch and runs this rank's part of it.

    Args:
        decoder: the module whose forward it replaces: ``of`` itself, or the text decoder in it.
        running: what the model's functions share.
        by_lengths: whether the attention is varlen: it takes the lengths of packed sequences, and no mask.
        of: the whole model.
        mixes: whether layers beside attention mix positions, which then get packed boundaries and padding.
    """
    original = current_forward(decoder)
    names, by_mask = _arguments(original), reads_positions_from_mask(decoder)
    not_passed = _OF_TOWERS if decoder is not of else ()
    keeps_padding = not mixes or bool(padding_builders(decoder))

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = running.whole()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if not name.startswith(not_passed)}
        if running.order.slots > 1:
            whole.documents = documents(
                {name: value for name, value in given.items() if value is not None}, whole, by_lengths
            )
        given, boundaries = handed_down(given) if mixes else (given, {})
        inputs = part_of(given, whole, running.order)
        if by_mask:
            check_positions(whole)
        if not keeps_padding:
            refuse_padding(whole)
        if by_lengths and running.order.slots == 1 and not boundaries and "cu_seq_lens_q" not in inputs:
            inputs |= packing_of(whole)
        inputs |= boundaries
        whole.is_cut = True
        try:
            return original(self, **inputs)
        finally:
            whole.is_cut = False

    return forward


def _arguments(forward: Any) -> list[str]:
    return [*inspect.signature(forward).parameters][1:]  # without self


def causal_loss(original: Callable[..., Any], running: RunningForward) -> Callable[..., Tensor]:
    """The loss of the whole sequence: the sum over all ranks' labels, divided by the number of labels on all ranks."""

    def loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        whole = running.whole()
        whole.loss_was_taken = True
        items = whole.items if num_items_in_batch is None else num_items_in_batch
        kwargs |= {"num_items_in_batch": items, "shift_labels": whole.labels_here}
        return sum_over_ranks(original(logits, whole.labels_here, vocab_size, **kwargs), running.group)

    return loss


def load_balancing_loss(original: Callable[..., Any], running: RunningForward) -> Callable[..., Any]:
    """The load-balancing loss of all ranks' tokens.

    It is not a mean over tokens, so the ranks' losses can't be averaged; the router logits of all ranks are gathered.
    """

    def loss(gate_logits: Any, num_experts: int, top_k: int, attention_mask: Any = None) -> Any:
        if not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        whole = running.whole()
        ranks = running.group.size()
        layers = torch.stack([each.to(gate_logits[0].device) for each in gate_logits])
        by_sequence = layers.unflatten(1, (-1, whole.length // ranks))
        gathered = whole_sequence(by_sequence, 2, running.order).flatten(1, 2)
        return original(tuple(gathered.unbind(0)), num_experts, top_k, whole.padding)

    return loss


def _check_attention(model: nn.Module, config_at: str, interface: str) -> None:
    """Raise if ``bind``, or transformers' ``set_attn_implementation``, has replaced the interface of Ulysses since."""
    found = interface_of(model.get_submodule(config_at))
    if found != interface:
        raise BindingError(
            f"the attention was set to {found} after apply_ulysses, so it would see only one rank's positions. Undo "
            "that change, undo() the sequence parallelism, bind or set the attention, and call apply_ulysses last"
        )
