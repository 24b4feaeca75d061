"""Runs delta rules, scans and causal convolutions over a sequence of which each rank holds a part.

Heads of a recurrence don't depend on each other, so around it the ranks exchange positions for heads, as around
attention, and the kernel computes the whole sequence for some of the heads. A convolution needs no more than the few
positions before a rank's own: their end is sent to the later ranks. Both keep nothing between calls, so a layer may be
recomputed in backward (gradient checkpointing).

Shapes: B rows, S positions, n ranks, H heads, h of them on a rank, C channels, W the width of a convolution.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.errors import ConfigError
from veomni_transformers.packed.boundaries import BOUNDS_OF_ROWS, OF_THE_WHOLE, boundaries_in
from veomni_transformers.sequence.exchange import ScatterHeads, gather_heads_scatter_seq, gather_seq_scatter_heads
from veomni_transformers.sequence.inputs import LENGTHS
from veomni_transformers.sequence.order import Order
from veomni_transformers.sequence.slicing import sp_pad_and_slice

Function = Callable[..., Any]
BOUNDARIES = LENGTHS | {"seq_idx", BOUNDS_OF_ROWS}
_STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states")


def by_heads(call: Function, order: Order, of_positions: Sequence[str], of_heads: Sequence[str] = ()) -> Function:
    """``call``, a recurrence of each head, for inputs and an output that are this rank's part of the sequence.

    Any number of heads can run on any number of ranks: where n does not divide them, heads of zeros make them up; heads
    that serve several others (keys, groups) are repeated as far as needed.

    Args:
        call: what a bound layer calls. It gives ``[B, S, H, ..]``, or a tuple that starts with that.
        order: the n ranks that share the sequence, and where it lies on them.
        of_positions: the arguments ``[B, S/n, H or fewer, ..]``.
        of_heads: the arguments ``[H]``, or ``None``.

    Raises:
        ConfigError: in a call, if a state is given or requested.
    """
    names, group = tuple(inspect.signature(call).parameters), order.group

    def of_whole_sequence(*args: Any, **kwargs: Any) -> Any:
        given, boundaries = _arguments(names, args, kwargs)
        if any(given.get(name) is not None and given[name] is not False for name in _STATES):
            raise ConfigError("a sequence-parallel model keeps no cache: call it without states of its layers")
        parts = [given[name] for name in of_positions]
        heads = max(part.shape[2] for part in parts)
        given |= zip(of_positions, _scattered(parts, heads, order), strict=True)
        given |= {
            name: sp_pad_and_slice(given[name], 0, group=group) for name in of_heads if given.get(name) is not None
        }
        found = call(**{**given, **boundaries})
        output, *rest = found if isinstance(found, tuple) else (found,)
        output = order.by_ranks(output, 1)
        mine = gather_heads_scatter_seq(output, head_dim=2, seq_dim=1, group=group)[:, :, :heads]
        return (mine, *rest) if isinstance(found, tuple) else mine

    return of_whole_sequence


def after_earlier_ranks(call: Function, order: Order) -> Function:
    """``call``, a causal convolution of ``[B, C, S]``, for this rank's ``[B, C, S/n]``, one call for each piece."""
    names = tuple(inspect.signature(call).parameters)
    x_name, weight_name, *_ = names

    def of_own_positions(*args: Any, **kwargs: Any) -> Any:
        given, boundaries = _arguments(names, args, kwargs)
        pieces = given[x_name].chunk(len(order.numbers), -1)
        found = []
        befores = _before(pieces, given[weight_name].shape[-1] - 1, order)
        for number, x, before in zip(order.numbers, pieces, befores, strict=True):
            width, length = before.shape[-1], x.shape[-1]
            given[x_name] = _joined([before, x])
            if (numbers := boundaries.get("seq_idx")) is not None:
                given["seq_idx"] = numbers.narrow(1, number * length - width, width + length)
            found.append(_after(call(**given), width))
        return _joined(found) if len(found) > 1 else found[0]

    return of_own_positions


def handed_down(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A whole batch's arguments without the boundaries of packed sequences, and the argument that hands these down.

    Layers pass it on like any other. Under their own names the boundaries would be read as those of a rank's part.

    Raises:
        PackedSequencesError: boundaries don't fit the input.
    """
    kept = {name: value for name, value in given.items() if name not in BOUNDARIES}
    found = boundaries_in(given) or {name: value for name, value in given.items() if name not in kept}
    return kept, {OF_THE_WHOLE: found} if found else {}


def _arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """A call's arguments by name, and the boundaries of the packed sequences that were handed down."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given, given.pop(OF_THE_WHOLE, {})


def _scattered(parts: Sequence[Tensor], heads: int, order: Order) -> list[Tensor]:
    """Every part ``[B, S/n, heads or fewer, ..]`` as ``[B, S, h or fewer, ..]``; one exchange for each dtype."""
    group, ranks = order.group, order.group.size()
    missing, ready = -heads % ranks, []
    for part in parts:
        own = part.shape[2]
        copies = heads // own if missing else ranks // math.gcd(own, ranks)
        wide = part.unsqueeze(-1) if part.dim() == 3 else part
        wide = wide.repeat_interleave(copies, 2) if copies > 1 else wide
        wide = F.pad(wide, (0, 0, 0, missing)) if missing else wide
        ready.append(wide.transpose(1, 2))
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(part.dtype for part in ready):  # a decay keeps its float32
        places = [place for place, part in enumerate(ready) if part.dtype == dtype]
        whole = ScatterHeads.apply(group, ranks, *(ready[place] for place in places))
        found |= {place: order.in_order(each.transpose(1, 2), 1) for place, each in zip(places, whole, strict=True)}
    return [found[place].squeeze(-1) if part.dim() == 3 else found[place] for place, part in enumerate(parts)]


def _before(pieces: Sequence[Tensor], width: int, order: Order) -> list[Tensor]:
    """The ``width`` positions before each of this rank's pieces ``[B, C, s]``, fewer where the sequence begins.

    Every piece's end is sent to all, since a piece may be shorter than ``width``. The first rank takes nothing of it,
    but takes part in the exchange of gradients, like all others.
    """
    if not width:
        return [x[..., :0] for x in pieces]
    ends = torch.cat([x[..., max(x.shape[-1] - width, 0) :] for x in pieces], -1)
    of_all = gather_seq_scatter_heads(ends.expand(order.group.size(), *ends.shape), 0, 0, order.group)
    of_all = order.in_order(of_all.movedim(0, -2).flatten(-2), -1)
    stops = [number * (ends.shape[-1] // len(pieces)) for number in order.numbers]
    return [of_all[..., max(stop - width, 0) : stop] for stop in stops]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """``[B, C, s]`` one after the other; where the last one's channels are adjacent, so are the result's."""
    if pieces[-1].stride(1) == 1:
        return torch.cat([each.transpose(1, 2) for each in pieces], 1).transpose(1, 2)
    return torch.cat([*pieces], -1)


def _after(x: Tensor, width: int) -> Tensor:
    """The positions of ``[B, C, s]`` from ``width`` on; where channels are adjacent, those of its gradient are too."""
    return x.transpose(1, 2)[:, width:].transpose(1, 2) if x.stride(1) == 1 else x[..., width:]
