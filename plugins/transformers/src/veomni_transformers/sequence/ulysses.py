"""Makes one model run sequence-parallel, on a part of the sequence per rank, and undoes it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from veomni_core.changes.change import AttributeChange, Change, ForwardChange
from veomni_core.changes.transformation import Transformation, transformations_reaching
from veomni_core.errors import BindingError, ConfigError
from veomni_core.planning.decisions import SiteDecision
from veomni_transformers.attention.config_changes import config_changes, interface_of
from veomni_transformers.attention.interface_names import RegisteredInterface
from veomni_transformers.attention.locator import attention_function, readers_by_owner
from veomni_transformers.attention.mask_builders import takes_lengths
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals
from veomni_transformers.sequence.attention import ulysses_attention, whole_mask
from veomni_transformers.sequence.divided_towers import described, division_changes, divisions
from veomni_transformers.sequence.exchange import ranks_of
from veomni_transformers.sequence.forward import (
    RunningForward,
    causal_loss,
    load_balancing_loss,
    split_forward,
    whole_forward,
)
from veomni_transformers.sequence.mixers import mixer_changes, mixing_sites
from veomni_transformers.sequence.model_sites import sites_of
from veomni_transformers.sequence.order import Order
from veomni_transformers.sequence.overlap import overlapped_forward
from veomni_transformers.sequence.refusals import LOAD_BALANCING, of_text, refuse_model
from veomni_transformers.sequence.ring import ring_attention, ring_blocks, ring_mask

_NUMBERS = itertools.count(1)


class SequenceParallel(Transformation):
    """One model that runs on a part of the sequence per rank. As a context manager it undoes itself on exit.

    Attributes:
        group: the ranks that share each sequence. Deep copies of the model share the group.
        order: which positions each of them holds.
        attention: the attention's name in configs.
        overlap: whether exchanges run while projections are computed.
        towers: how the ranks divide the inputs of towers; empty for a model of text alone.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=2)  # stands for the first of two ranks
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> with apply_ulysses(model) as state:
        ...     state.describe()
        'Ulysses, sp=2, over sdpa'
        >>> state.undo()
        Traceback (most recent call last):
            ...
        veomni_core.errors.BindingError: this sequence parallelism is not in force: it is already undone, or its model
        was freed
    """

    name = "sequence parallelism"

    def __init__(self, model: nn.Module, order: Order, attention: str, overlap: bool = False, towers: str = "") -> None:
        super().__init__(model)
        self.group, self.order, self.attention, self.overlap = order.group, order, attention, overlap
        self.towers = towers

    def describe(self) -> str:
        """For receipts: ``Ulysses, sp=4, over flash_attention_4``, or ``ring, cp=2, Ulysses, sp=2, over sdpa``."""
        kinds = [f"ring, cp={self.order.slots}"] if self.order.slots > 1 or not self.order.heads else []
        kinds += [f"Ulysses, sp={self.order.heads.size()}"] if self.order.heads else []
        overlapped = ", overlapping with projections" if self.overlap else ""
        return f"{', '.join(kinds)}, over {self.attention}{overlapped}{self.towers and f'; {self.towers}'}"

    def gather_outputs(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's part ``[.., S/n, ..]`` of logits, say, joined as they follow in the sequence, on every rank."""
        return self.order.whole(x, dim)


def apply_ulysses(model: nn.Module, group: ProcessGroup | None = None, *, overlap: bool = False) -> SequenceParallel:
    """Let each rank of ``group`` run ``model`` on its part of the sequence, with whichever attention kernel is bound.

    Call it after :func:`veomni_core.bind` (and before DDP or FSDP2). From then on every rank of the group calls the
    model with the same whole batch (``input_ids[B, S]``, ``labels``, ``attention_mask``, ``position_ids``,
    ``cu_seq_lens_q``, pixels, sound); the model runs on ``[B, S/n]`` of it. Of pictures, frames and sounds each rank
    runs towers on some, and gets all features, among those of words. A tower in which they depend on one another runs
    whole on each rank; the receipt says so. ``loss`` and ``aux_loss`` are those of the whole sequence on every rank;
    ``logits[B, S/n, V]`` are this rank's (:func:`gather_outputs` joins them). A parameter's
    gradient is the *mean* over the ranks; DDP or FSDP2 over all data-parallel and sequence-parallel ranks computes it.

    A call of the model raises ``ConfigError`` for inputs that can't be sharded, ``HostError`` if the first batches of
    the ranks differ, and ``BindingError`` if another attention was chosen after this call.

    Args:
        model: a transformers model, bound or not.
        group: the ranks that share the sequence; all ranks without it.
        overlap: exchange queries, keys and values while the next of them are projected, and their gradients likewise.

    Returns:
        The transformation, with :meth:`SequenceParallel.undo`.

    Raises:
        ConfigError: the model can't run sequence-parallel over this many ranks; the message has every reason.
        BindingError: it runs sequence-parallel already, or kernels were bound in a part of it alone.
        HostError: there is no process group.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=1)  # torchrun gives more ranks
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model, ids = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)), torch.tensor([[5, 9, 17, 3]])
        >>> loss = model(ids, labels=ids).loss
        >>> state = apply_ulysses(model)
        >>> state.describe()
        'Ulysses, sp=1, over sdpa'
        >>> torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, loss)
        >>> state.undo()
    """
    group, _, _ = ranks_of(group)
    return _applied(model, Order(group, group), overlap)


def apply_context_parallel(
    model: nn.Module,
    group: ProcessGroup | None = None,
    *,
    sp_group: ProcessGroup | None = None,
    overlap: bool = False,
) -> SequenceParallel:
    """As :func:`apply_ulysses`, but attention's keys and values travel round a ring of ranks; heads stay together.

    Any number of heads can run on any number of ranks. The sequence's length S must be a multiple of 2n: in zig-zag
    order each slot of the ring holds two of its parts, with equal work under a causal mask. Blocks that no query sees
    (sliding windows, packed sequences) are left out. Layers that carry a state compute all positions for some of their
    heads (:mod:`veomni_transformers.sequence.recurrence`).

    Args:
        model: a transformers model, bound or not, whose attention is proven and causal and whose kernel gives blocks
            with their log-sum-exp: ``sdpa``, ``flash_attention_2`` and ``flash_attention_3``.
        group: the n ranks that share the sequence; all ranks without it.
        sp_group: this rank and those of its neighbours in ``group`` with which it exchanges positions for heads
            (Ulysses): then a slot is such a group. Its size divides n.
        overlap: as for :func:`apply_ulysses`, with ``sp_group``.

    Returns:
        The transformation, with :meth:`SequenceParallel.undo` and :meth:`SequenceParallel.gather_outputs`.

    Raises:
        ConfigError: the model can't run so, or ``sp_group`` does not fit ``group``; the message has every reason.
        BindingError: as :func:`apply_ulysses`.
        HostError: there is no process group.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=2)  # stands for the first of two ranks
        >>> shape = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> apply_context_parallel(model).describe()
        'ring, cp=2, over sdpa'
    """
    group, ranks, rank = ranks_of(group)
    sizes = 1 if sp_group is None else sp_group.size()
    neighbours = range(rank - rank % sizes, rank - rank % sizes + sizes)
    members = [distributed.get_global_rank(group, each) for each in neighbours] if ranks % sizes == 0 else []
    if sp_group is not None and distributed.get_process_group_ranks(sp_group) != members:
        raise ConfigError(
            f"sp_group has the ranks {distributed.get_process_group_ranks(sp_group)}; give it neighbours of group's "
            f"{distributed.get_process_group_ranks(group)}, as many as divide them"
        )
    if overlap and sizes == 1:
        raise ConfigError("overlap is for exchanges of heads: give an sp_group of several ranks, or leave it out")
    return _applied(model, Order(group, sp_group if sizes > 1 else None, ranks // sizes), overlap)


def _applied(model: nn.Module, order: Order, overlap: bool) -> SequenceParallel:
    if any(isinstance(each, SequenceParallel) for each in transformations_reaching(model)):
        raise BindingError("this model is sequence-parallel already: undo() that first")
    decisions = sites_of(model)
    if any(each.site.op_name.startswith("dsa_") or each.site.variant == "native_sparse" for each in decisions):
        raise ConfigError(
            f"{type(model).__name__} can't run sequence-parallel: its attention chooses keys, and would see this "
            "rank's alone"
        )
    attention = of_text(model, [decision for decision in decisions if decision.site.op_name == "attention"])
    balancing = [decision.site for decision in decisions if decision.site.op_name == "load_balancing_loss"]
    mixers = mixing_sites(decisions, [each.site.path for each in attention])
    refuse_model(model, [decision.site for decision in attention], balancing, mixers, order, overlap)
    (chosen,) = attention
    path = chosen.site.path
    name = chosen.kernel if chosen.bound else interface_of(model.get_submodule(path))
    towers = divisions(model, order.group)
    applied = SequenceParallel(model, order, name, overlap, described(towers))
    changes = _changes(model, order, path, [site.path for site in balancing], mixers, overlap)
    owner = SequenceParallel.name
    of_towers = ((at, owner, change) for at, change in division_changes(model, towers, order.group))
    applied.apply(itertools.chain(of_towers, changes))
    return applied


def _changes(
    model: nn.Module,
    order: Order,
    attention: str,
    balancing: Sequence[str],
    mixers: Sequence[SiteDecision],
    overlap: bool,
) -> Iterator[tuple[str, str, Change]]:
    """Every change, with its module path: to attention, other mixers, load-balancing losses, and the whole model."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    owner, running = SequenceParallel.name, RunningForward(order)
    own = interface_of(model.get_submodule(attention))
    name = f"veomni_{'ring' if order.slots > 1 else 'ulysses'}_{next(_NUMBERS)}_{own}"
    mask = ALL_MASK_ATTENTION_FUNCTIONS[own]
    by_lengths = takes_lengths(mask)
    over: Any = attention_function(model, attention)  # not None: eager attention is refused
    build = whole_mask(mask, running.whole, reads_positions=not by_lengths)
    if order.slots > 1:
        blocks: Any = ring_blocks(over)  # not None: attention without blocks is refused
        over, build = ring_attention(blocks, order), ring_mask(mask, running.whole)
    function = ulysses_attention(over, order.heads, exchanges=not overlap)
    heads: Any = order.heads  # not None where there are readers
    readers = readers_by_owner(model)[attention] if overlap and heads is not None else ()
    yield attention, owner, RegisteredInterface(model, function, build, name, beneath=own)
    for change in config_changes(model, attention, name):
        yield attention, owner, change
    for path, each in mixer_changes(model, mixers, order, running.whole):
        yield path, owner, each
    for path in balancing:
        module = model.get_submodule(path)
        forward = current_forward(module)
        loss = load_balancing_loss(dict(global_functions(forward))[LOAD_BALANCING], running)
        yield path, owner, ForwardChange(module, with_globals(forward, {LOAD_BALANCING: loss}))
    if "labels" in inspect.signature(type(model).forward).parameters:
        of_all_ranks: Any = causal_loss(model.loss_function, running)  # type: ignore[arg-type]
        yield "", owner, AttributeChange(model, "_loss_function", of_all_ranks)
    for path in readers:
        reader = model.get_submodule(path)
        yield path, owner, ForwardChange(reader, overlapped_forward(reader, heads, lambda: running.sequence))
    decoder = model.get_submodule(attention)
    yield attention, owner, ForwardChange(decoder, split_forward(decoder, running, by_lengths, model, bool(mixers)))
    yield "", owner, ForwardChange(model, whole_forward(model, running, attention, name))
