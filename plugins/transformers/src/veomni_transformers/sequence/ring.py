"""Ring attention: keys and values travel round a ring of ranks, and each computes its queries block by block.

While a block is computed the next keys and values are on their way. Outputs are merged by their log-sum-exp. In
backward keys and values travel once more, and their gradients with them, one hop further: home. Nothing is kept between
calls, so a layer may be recomputed in backward (gradient checkpointing).

Shapes: B rows, s positions of a rank, Hq query heads, Hk key heads, D and Dv widths; heads are ``[B, s, H, D]`` here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed

from veomni_core.errors import ConfigError
from veomni_core.kernels import IGNORED, autocast_off, cast_as_autocast, first_derivatives_only
from veomni_ops.attention_blocks import TORCH, Block, Blocks
from veomni_ops.contract import compute_dtype
from veomni_transformers.packed.boundaries import BOUNDS_OF_ROWS, boundaries_in
from veomni_transformers.sequence.inputs import WholeSequence
from veomni_transformers.sequence.order import Order


@dataclass(frozen=True)
class Documents:
    """Stands for a mask: for each row, or for all, the positions at which its sequences begin, from 0 on."""

    begins: tuple[tuple[int, ...], ...] = ((0,),)


@dataclass(frozen=True)
class Part:
    """Of a block some queries and keys, by their places on their ranks, all of one sequence."""

    queries: slice
    keys: slice
    causal: bool
    left: int | None


def ring_blocks(function: Any) -> Blocks | None:
    """How blocks of this attention function are computed; ``None`` if its library gives no log-sum-exp."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    while isinstance(function, partial):
        function = function.func
    return TORCH if function is sdpa_attention_forward else getattr(function, "blocks", None)


def ring_attention(blocks: Blocks, order: Order) -> Any:
    """Causal attention of queries that are this slot's positions, as transformers calls it; the mask is
    :class:`Documents` or ``None``.

    A call raises ``ConfigError`` for another mask, and for attention that is not causal.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        causal = options.get("is_causal")
        if not (module.is_causal if causal is None else causal):
            raise ConfigError("ring attention is causal, and this model's attention is not; use Ulysses (sp_size)")
        if not isinstance(attention_mask, Documents | None):
            raise ConfigError(
                f"ring attention takes no mask of queries and keys ({type(attention_mask).__name__}): pass a padding "
                "mask [batch, positions], or packed sequences; or use Ulysses (sp_size)"
            )
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        block = Block(scaling, options.get("softcap") or 0.0)
        ring = _Ring(blocks, order, attention_mask or Documents(), options.get("sliding_window"), block)
        heads = tuple(cast_as_autocast(each.transpose(1, 2)) for each in (query, key, value))
        with autocast_off(query.device.type):
            return _RingAttention.apply(ring, options.get("s_aux"), *heads), None

    return torch.compiler.disable(attend)


def ring_mask(build: Any, whole: Any) -> Any:
    """A function that builds masks, in the place of ``build``: :class:`Documents` where the whole sequence is cut."""

    def mask(**call: Any) -> Any:
        sequence: WholeSequence = whole()
        if not sequence.is_cut:
            return build(**call)
        if call.get("use_vmap"):
            raise ConfigError("this model adds its own mask function, which ring attention can't compute by blocks")
        return sequence.documents

    return mask


def documents(inputs: dict[str, Any], whole: WholeSequence, by_lengths: bool) -> Documents | None:
    """Where sequences begin in each row of a whole batch; ``None`` where each row is one. Waits for the device.

    Padding is a sequence of its own: what the others see is the same.

    Args:
        inputs: the decoder's arguments.
        whole: the whole sequence.
        by_lengths: whether the kernel reads positions beside a mask that keeps everything, as FlashAttention's does.

    Raises:
        ConfigError: there is a mask of another kind, padding between a row's tokens, or a label at padding.
        PackedSequencesError: boundaries don't fit the input.
    """
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise ConfigError(
            "ring attention takes padding [batch, positions] and packed sequences, and no other mask; use Ulysses "
            "(sp_size) for masks of queries and keys, and for models that build theirs outside of their decoder"
        )
    kept = None if mask is None or mask.all() else mask.bool()
    if kept is None and by_lengths:
        inputs = {**inputs, "attention_mask": None}
    found = boundaries_in(inputs)
    ends = found.get(BOUNDS_OF_ROWS, found.get("cu_seq_lens_q"))
    if ends is None and kept is None:
        return None
    begins: list[set[int]] = [{0} for _ in range(whole.batch)]
    for end in ends.tolist()[:-1] if ends is not None else ():
        begins[end // whole.length].add(end % whole.length)
    if kept is not None:
        if whole.labels is not None and ((whole.labels != IGNORED) & ~kept).any():
            raise ConfigError(
                "a token at padding has a label, and ring attention computes it otherwise than one GPU: write "
                f"{IGNORED} for the labels of padding, and for the first token behind padding to the left"
            )
        if (kept[:, 0] + (kept[:, 1:] & ~kept[:, :-1]).sum(1) > 1).any():
            raise ConfigError("ring attention takes padding before and behind a row's tokens, not between them")
        for row, place in (kept[:, 1:] != kept[:, :-1]).nonzero().tolist():
            begins[row].add(place + 1)
    rows = [tuple(sorted(each)) for each in begins]
    return Documents(tuple(rows[:1] if len({*rows}) == 1 else rows))


class _Ring:
    """One call's blocks: whose keys and values are here in which step, and which of them this rank's queries see."""

    def __init__(self, blocks: Blocks, order: Order, documents: Documents, window: int | None, block: Block) -> None:
        self.blocks, self.order = blocks, order
        self._documents, self._window, self._block = documents, window, block
        self.slots = order.slots
        self._inside = order.group.size() // order.slots
        self._slot = order.group.rank() // self._inside

    def steps(self, *tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Every slot and its tensors, this rank's first; the next are on their way meanwhile."""
        here = [each.contiguous() for each in tensors]
        for step in range(self.slots):
            coming = self.passed_on(here) if step + 1 < self.slots else None
            yield (self._slot - step) % self.slots, here
            here = coming.arrived() if coming is not None else here

    def passed_on(self, tensors: Sequence[Tensor]) -> _Coming:
        """Send tensors to the next slot; those of the slot before this one arrive in their place."""
        return _Coming(tensors, self._peer(self._slot + 1), self._peer(self._slot - 1), self.order)

    def _peer(self, slot: int) -> int:
        group = self.order.group
        place = slot % self.slots * self._inside + group.rank() % self._inside
        return distributed.get_global_rank(group, place)

    def parts(self, source: int, length: int) -> Iterator[tuple[slice, Part, Block]]:
        """What this rank's queries see of the keys of the slot ``source``, each ``length`` long, by rows."""
        for row, begins in enumerate(self._documents.begins):
            rows = slice(row, row + 1) if len(self._documents.begins) > 1 else slice(None)
            for part in _parts(begins, self._slot, source, self.slots, length // 2, self._window):
                yield rows, part, replace(self._block, causal=part.causal, left=part.left)


class _Coming:
    """Tensors that are on their way to this rank, as this rank's are to another."""

    def __init__(self, tensors: Sequence[Tensor], to: int, source: int, order: Order) -> None:
        self._sent, self._here = tensors, [torch.empty_like(each) for each in tensors]
        sends = [distributed.P2POp(distributed.isend, each, to, order.group) for each in tensors]
        receives = [distributed.P2POp(distributed.irecv, each, source, order.group) for each in self._here]
        self._work = distributed.batch_isend_irecv([*sends, *receives])

    def arrived(self) -> list[Tensor]:
        for work in self._work:
            work.wait()
        return self._here


@lru_cache(maxsize=256)
def _parts(
    begins: tuple[int, ...], slot: int, source: int, slots: int, piece: int, window: int | None
) -> tuple[Part, ...]:
    """The parts of one row's block between two slots, whose positions are two pieces each (:class:`Order`)."""
    found = []
    for q_place, q_number in enumerate((slot, 2 * slots - 1 - slot)):
        for k_place, k_number in enumerate((source, 2 * slots - 1 - source)):
            q_moved, k_moved = (
                (place - number) * piece for place, number in ((q_place, q_number), (k_place, k_number))
            )
            for (first, last), (k_first, k_last) in _seen(begins, q_number * piece, k_number * piece, piece, window):
                queries, keys = slice(first + q_moved, last + q_moved), slice(k_first + k_moved, k_last + k_moved)
                # Where the last query does not see the first key. It is at the last key, as Block counts.
                left = k_last - last + window - 1 if window is not None and last - window > k_first else None
                found.append(Part(queries, keys, q_number == k_number, left))
    return tuple(found)


def _seen(
    begins: tuple[int, ...], q_start: int, k_start: int, piece: int, window: int | None
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The bounds of queries and keys, of two pieces of a sequence, between which queries see keys."""
    place = bisect_right(begins, q_start)
    if q_start == k_start:
        inside = begins[place : bisect_left(begins, q_start + piece)]
        for bounds in pairwise((q_start, *inside, q_start + piece)):
            yield bounds, bounds
        return
    # One sequence at most reaches from a piece into a later one.
    first, last = max(k_start, begins[place - 1]), min([q_start + piece, *begins[place : place + 1]])
    seeing_all = last
    if window is not None:
        first, last = max(first, q_start - window + 1), min(last, k_start + piece - 1 + window)
        seeing_all = min(max(first + window, q_start), last)
    if k_start < q_start and first < k_start + piece:
        for bounds in ((q_start, seeing_all), (seeing_all, last)):
            if bounds[0] < bounds[1]:
                yield bounds, (first, k_start + piece)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, sinks: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        wide = compute_dtype(query)
        total = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=wide)
        lse = query.new_full((query.shape[0], query.shape[2], query.shape[1]), float("-inf"), dtype=wide)
        for source, (keys, values) in ring.steps(key, value):
            for rows, part, block in ring.parts(source, query.shape[1]):
                of_part = (query[rows, part.queries], keys[rows, part.keys], values[rows, part.keys])
                found, its_lse = ring.blocks.attend(*of_part, block)
                _merge(total[rows, part.queries], lse[rows, :, part.queries], found, its_lse)
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.to(wide).view(1, -1, 1))
            total *= (lse - with_sinks).exp().transpose(1, 2).unsqueeze(-1)
            lse = with_sinks
        output = total.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        return output

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        ring, wide, upstream = ctx.ring, compute_dtype(query), upstream.contiguous()
        of_query = torch.zeros_like(query, dtype=wide)
        coming = None
        for source, (keys, values) in ring.steps(key, value):
            of_key, of_value = (torch.zeros_like(each, dtype=wide) for each in (keys, values))
            for rows, part, block in ring.parts(source, query.shape[1]):
                queries, seen = (rows, part.queries), (rows, part.keys)
                of_part = (upstream[queries], query[queries], keys[seen], values[seen], output[queries])
                found = ring.blocks.gradients(*of_part, lse[rows, :, part.queries], block)
                for whole, places, each in zip((of_query, of_key, of_value), (queries, seen, seen), found, strict=True):
                    whole[places] += each
            if coming is not None:  # what earlier slots have found for these keys
                for own, earlier in zip((of_key, of_value), coming.arrived(), strict=True):
                    own += earlier
            coming = ring.passed_on((of_key, of_value)) if ring.slots > 1 else None
        if coming is not None:  # the last hop brings home what this rank's keys were given
            of_key, of_value = coming.arrived()
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(wide).view(1, -1, 1) - lse).exp()  # the weight that each query gives to its sink
            of_weight = (upstream.to(wide) * output).sum(-1).transpose(1, 2)
            of_sinks = -(share * of_weight).sum((0, 2)).to(sinks.dtype)
        return None, of_sinks, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _merge(total: Tensor, lse: Tensor, found: Tensor, its_lse: Tensor) -> None:
    """Add to ``total[B, s, H, Dv]`` and ``lse[B, H, s]`` what these queries see in one more block."""
    both = torch.logaddexp(lse, its_lse)
    earlier, later = ((each - both).exp().transpose(1, 2).unsqueeze(-1) for each in (lse, its_lse))
    total.mul_(earlier).add_(found * later)
    lse.copy_(both)
