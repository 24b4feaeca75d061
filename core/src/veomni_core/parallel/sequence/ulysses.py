"""Makes one bound model run sequence-parallel, on a part of the sequence per rank, and undoes it."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from veomni_core.binding.bind import binding_of
from veomni_core.changes.change import AttributeChange, Change, ForwardChange
from veomni_core.changes.change_set import ChangeSet
from veomni_core.errors import BindingError, BoundModelPickleError
from veomni_core.parallel.sequence.agreement import check_batches_agree
from veomni_core.parallel.sequence.attention import packing_of, ulysses_attention, whole_mask
from veomni_core.parallel.sequence.exchange import ranks_of
from veomni_core.parallel.sequence.inputs import WholeSequence, check_positions, split_inputs
from veomni_core.parallel.sequence.losses import sum_over_ranks, whole_sequence
from veomni_core.parallel.sequence.refusals import attention_site, balancing_sites, reads_positions_from_mask
from veomni_core.sites.attention.config_changes import config_changes, interface_of
from veomni_core.sites.attention.interface_names import RegisteredInterface
from veomni_core.sites.functions import current_forward, global_functions, with_globals

_IN_FORCE = "_veomni_sequence_parallel"
_BALANCING = "load_balancing_loss_func"
_NUMBERS = itertools.count(1)


class SequenceParallel:
    """One model that runs on a part of the sequence per rank. As a context manager it undoes itself on exit."""

    def __init__(self, model: nn.Module, group: ProcessGroup, attention: str) -> None:
        self._model = weakref.ref(model)
        self.group, self.attention = group, attention
        self._changes = ChangeSet()
        self._whole: WholeSequence | None = None
        self._batches_agree = False

    @property
    def model(self) -> nn.Module:
        """The model that runs sequence-parallel.

        Raises:
            BindingError: the model was freed.
        """
        model = self._model()
        if model is None:
            raise BindingError("the model of this sequence parallelism was freed")
        return model

    def describe(self) -> str:
        """For receipts: ``Ulysses, sp=4, over flash_attention_4``."""
        return f"Ulysses, sp={self.group.size()}, over {self.attention}"

    def whole(self) -> WholeSequence:
        """The sequence of the forward that is running."""
        if self._whole is None:
            raise BindingError(
                "a submodule of a sequence-parallel model was called on its own, outside of the model that "
                "apply_ulysses was given: call that model"
            )
        return self._whole

    def undo(self) -> None:
        """Restore the model exactly as it was before.

        Raises:
            BindingError: already undone.
        """
        if vars(self.model).get(_IN_FORCE) is not self:
            raise BindingError("this sequence parallelism is not in force: it is already undone")
        self._changes.revert()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, *exception: object) -> None:
        if vars(self.model).get(_IN_FORCE) is self:
            self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        raise BindingError(
            "a sequence-parallel model can't be copied, because its process group can't: copy the model first, then "
            "call apply_ulysses"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BoundModelPickleError(
            "a sequence-parallel model can't be pickled. Save model.state_dict() or model.save_pretrained(), or undo()"
        )

    def _apply(self, changes: Iterable[Change]) -> None:
        try:
            for change in changes:
                self._changes.apply(change)
        except BaseException:
            self._changes.revert()
            raise


def apply_ulysses(model: nn.Module, group: ProcessGroup | None = None) -> SequenceParallel:
    """Let each rank of ``group`` run ``model`` on its part of the sequence, with whichever attention kernel is bound.

    Call it after :func:`veomni_core.bind` (and before DDP or FSDP2). From then on every rank of the group calls the
    model with the same whole batch (``input_ids[B, S]``, ``labels``, ``attention_mask``, ``position_ids``,
    ``cu_seq_lens_q``); the model runs on ``[B, S/n]`` of it. ``loss`` and ``aux_loss`` are those of the whole sequence
    on every rank; ``logits[B, S/n, V]`` are this rank's (:func:`gather_outputs` joins them). A parameter's gradient is
    the *mean* over the ranks; DDP or FSDP2 over all data-parallel and sequence-parallel ranks computes that mean.

    A call of the model raises ``ConfigError`` for inputs that can't be sharded, ``HostError`` if the first batches of
    the ranks differ, and ``BindingError`` if another attention was chosen after this call.

    Raises:
        ConfigError: the model can't run sequence-parallel over this many ranks; the message has every reason.
        BindingError: it runs sequence-parallel already.
        HostError: there is no process group.
    """
    group, _, _ = ranks_of(group)
    if _IN_FORCE in vars(model):
        raise BindingError("this model is sequence-parallel already: undo() that first")
    site = attention_site(model, group)
    state = SequenceParallel(model, group, _kernel_name(model, site.own))
    state._apply(_changes(model, state, site.path, site.own))
    return state


def _kernel_name(model: nn.Module, own: str) -> str:
    """The attention's name in configs: the bound kernel's, else the one that transformers is set to."""
    binding = binding_of(model)
    decisions = [d for op in binding.plan.ops if op.op_name == "attention" for d in op.sites] if binding else []
    return next((decision.kernel for decision in decisions if decision.bound), own)


def _changes(model: nn.Module, state: SequenceParallel, path: str, own: str) -> Iterator[Change]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    yield AttributeChange(model, _IN_FORCE, state)
    name = f"veomni_ulysses_{next(_NUMBERS)}_{own}"
    mask = ALL_MASK_ATTENTION_FUNCTIONS[own]
    by_lengths = mask is flash_attention_mask
    attention = ulysses_attention(ALL_ATTENTION_FUNCTIONS[own], state.group)
    # A weak reference, since transformers' process-wide tables would keep the model alive.
    whole: Any = weakref.WeakMethod(state.whole)
    whole_sequence_mask = whole_mask(mask, lambda: whole()(), reads_positions=not by_lengths)
    yield RegisteredInterface(model, attention, whole_sequence_mask, name, beneath=own)
    yield from config_changes(model, path, name)
    for site in balancing_sites(model):
        module = model.get_submodule(site.path)
        forward = current_forward(module)
        function = dict(global_functions(forward))[_BALANCING]
        forward = with_globals(forward, {_BALANCING: _balancing(function, state)})
        yield ForwardChange(module, forward)
    if "labels" in inspect.signature(type(model).forward).parameters:
        yield AttributeChange(model, "_loss_function", _causal_loss(model.loss_function, state))  # type: ignore[arg-type]
    forward = _whole_forward(current_forward(model), state, by_lengths, lambda: _check_in_force(state, path, name))
    yield ForwardChange(model, forward)
    if binding := binding_of(model):
        yield AttributeChange(binding, "sequence_parallel", state.describe())


def _check_in_force(state: SequenceParallel, path: str, name: str) -> None:
    """Raise if ``bind``, or transformers' ``set_attn_implementation``, has replaced the interface of Ulysses since."""
    found = interface_of(state.model.get_submodule(path))
    if found != name:
        raise BindingError(
            f"the attention was set to {found} after apply_ulysses, so it would see only one rank's positions. Undo "
            "that change, undo() the sequence parallelism, bind or set the attention, and call apply_ulysses last"
        )


def _whole_forward(
    original: Callable[..., Any], state: SequenceParallel, by_lengths: bool, check_in_force: Callable[[], None]
) -> Callable[..., Any]:
    _, *names = inspect.signature(original).parameters  # without self
    by_mask = reads_positions_from_mask(state.model)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_in_force()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not state._batches_agree and not torch.compiler.is_compiling():
            check_batches_agree(given, state.group)
            state._batches_agree = True
        inputs, whole = split_inputs(given, state.group)
        if by_mask:
            check_positions(whole)
        if by_lengths and "cu_seq_lens_q" not in inputs:
            inputs |= packing_of(whole)
        state._whole = whole
        try:
            output = original(self, **inputs)
        finally:
            state._whole = None
        if whole.labels_here is not None and not whole.loss_was_taken:
            raise BindingError(
                f"{type(self).__name__} computes its loss itself instead of calling its loss_function, so the loss "
                "can't be computed over all ranks"
            )
        return output

    return forward


def _causal_loss(original: Callable[..., Any], state: SequenceParallel) -> Callable[..., Tensor]:
    """The loss of the whole sequence: the sum over all ranks' labels, divided by the number of labels on all ranks."""

    def loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        whole = state.whole()
        whole.loss_was_taken = True
        items = whole.items if num_items_in_batch is None else num_items_in_batch
        kwargs |= {"num_items_in_batch": items, "shift_labels": whole.labels_here}
        return sum_over_ranks(original(logits, labels, vocab_size, **kwargs), state.group)

    return loss


def _balancing(original: Callable[..., Any], state: SequenceParallel) -> Callable[..., Any]:
    """The load-balancing loss of all ranks' tokens.

    It is not a mean over tokens, so the ranks' losses can't be averaged; the router logits of all ranks are gathered.
    """

    def loss(gate_logits: Any, num_experts: int, top_k: int, attention_mask: Any = None) -> Any:
        if not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        whole = state.whole()
        ranks = state.group.size()
        layers = torch.stack([each.to(gate_logits[0].device) for each in gate_logits])
        by_sequence = layers.unflatten(1, (-1, whole.length // ranks))
        gathered = whole_sequence(by_sequence, 2, state.group).flatten(1, 2)
        return original(tuple(gathered.unbind(0)), num_experts, top_k, whole.padding)

    return loss
