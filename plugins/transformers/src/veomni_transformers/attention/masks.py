"""Checks that under a mask interface each query sees the same keys as in eager attention.

Eager attention depends on its mask only. Under the other interfaces transformers may pass no mask, or only the padding.
The kernel infers the rest: from ``is_causal`` (of the call, else of the module), the sliding window and the packing;
and from the interface where causal attention is aligned (:mod:`veomni_ops.attention`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from veomni_ops.attention import visible
from veomni_transformers.attention.module_values import ModuleValues
from veomni_transformers.attention.trace import AttentionCall, Trace

# Options that differ between interfaces by design, or positions, which the mask takes into account already.
_NOT_COMPARED = frozenset({"is_causal", "sliding_window", "position_ids", "cache_position", "output_attentions"})
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")


def difference(eager: Trace, other: Trace, at_first: bool, values: ModuleValues) -> str:
    """What a kernel of the other interface would compute differently; empty if nothing.

    Queries that see no key in eager attention, and those at padding, are left out: see :func:`differs_at_padding`.
    ``at_first``: without a mask, the other interface aligns the first query with the first key. ``values`` runs the
    modules of towers, and those that call their attention another number of times.
    """
    if len(eager.modules) != len(other.modules):
        return f"the model runs its attention {len(other.modules)} times, and {len(eager.modules)} times for eager"
    for mine, theirs in _distinct(eager, other):
        if why := _given_otherwise(mine, theirs) or _seen_otherwise(mine, theirs, at_first, eager.padding):
            return f"{type(mine.module).__name__} {why}"
    for run, calls, others in _runs(eager, other):
        if len(calls) == len(others) and (not eager.of_tower or eager.padding is not None):
            continue
        why, examined = values.difference(eager.modules[run], other.modules[run], at_first)
        if why and (examined or len(calls) != len(others)):
            name = type((calls or others)[0].module).__name__
            counts = f" calls its attention {len(others)} times, and {len(calls)} times for eager, and"
            return f"{name}{counts if len(calls) != len(others) else ''}: {why}"
    return ""


def differs_at_padding(eager: Trace, other: Trace, at_first: bool) -> bool:
    """Whether the masks, which are equal otherwise, differ at queries that see no key or are padding."""
    return any(_seen_otherwise(*pair, at_first, None, every=True) for pair in _distinct(eager, other))


def _runs(eager: Trace, other: Trace) -> Iterator[tuple[int, list[AttentionCall], list[AttentionCall]]]:
    """The place of each run of an attention module, and its calls in both traces."""
    calls: list[list[list[AttentionCall]]] = [[[] for _ in trace.modules] for trace in (eager, other)]
    for trace, by_run in zip((eager, other), calls, strict=True):
        for call in trace.calls:
            by_run[call.run].append(call)
    yield from ((run, mine, theirs) for run, (mine, theirs) in enumerate(zip(*calls, strict=True)) if mine or theirs)


def _distinct(eager: Trace, other: Trace) -> Iterator[tuple[AttentionCall, AttentionCall]]:
    """The calls of both runs in pairs, without those that only repeat a pair's masks: they are large for images."""
    seen: set[Hashable] = set()
    for _, calls, others in _runs(eager, other):
        for mine, theirs in zip(calls, others, strict=True) if len(calls) == len(others) else ():
            pair = _masks(mine), _masks(theirs)
            if pair not in seen or _given_otherwise(mine, theirs):
                seen.add(pair)
                yield mine, theirs


def _given_otherwise(eager: AttentionCall, other: AttentionCall) -> str:
    if eager.path != other.path or [h.shape for h in eager.heads] != [h.shape for h in other.heads]:
        return "is given other queries, keys and values than for eager"
    differing = [name for name in _names(eager.options, other.options) if not _alike(eager, other, name)]
    return f"is given another {' and '.join(differing)} than for eager" if differing else ""


def _masks(call: AttentionCall) -> Hashable:
    """A key of what decides which keys the queries see, to compare the calls of one trace that share it only once."""
    query, key, _ = call.heads
    bounds = tuple(id(call.options.get(name)) for name in _BOUNDS)
    window = call.options.get("sliding_window")
    return id(call.mask), query.shape[:3], key.shape[2], _is_causal(call), window, bounds


def _seen_otherwise(
    eager: AttentionCall, other: AttentionCall, at_first: bool, padding: Tensor | None, every: bool = False
) -> str:
    found, why = added_mask(other, at_first)
    if found is None:
        return why
    wanted = as_added(eager.mask)
    query, key, _ = eager.heads
    if not wanted.shape and not found.shape:
        return ""
    scores = torch.zeros(()).expand(1, 1, query.shape[2], key.shape[2])
    found, wanted, _ = torch.broadcast_tensors(found, wanted, scores)  # type: ignore[no-untyped-call]
    rows = torch.isfinite(wanted).any(-1) | every
    if padding is not None and padding.shape == (query.shape[0], query.shape[2]):
        rows = rows & padding.bool()[:, None, :]
        found, wanted = (added.expand(*rows.shape, -1) for added in (found, wanted))
    if torch.equal(found[rows], wanted[rows]):
        return ""
    if other.mask is None:
        by_itself = "causal" if _is_causal(other) else "not causal"
        return f"gets no mask and is {by_itself} by itself, while eager's mask lets queries see other keys"
    return "gets a mask that lets queries see other keys than eager's"


def added_mask(call: AttentionCall, at_first: bool) -> tuple[Tensor | None, str]:
    """The mask that a kernel applies in effect, given its mask, ``is_causal``, window and packing, and its alignment.

    In the form of :func:`as_added`; or ``None``, and the reason why it is not known.
    """
    if call.mask is not None and call.mask.dim() == 4:
        return as_added(call.mask), ""
    causal, window = _is_causal(call), call.options.get("sliding_window")
    if causal is None:
        return None, "gets no mask, and does not say whether it is causal (is_causal)"
    query, key, _ = call.heads
    bounds = [call.options.get(name) for name in _BOUNDS]
    kept = None
    if causal or window is not None or any(bound is not None for bound in bounds):
        first = at_first and call.mask is None
        kept = visible(torch.empty(query.shape[2], key.shape[2]), causal, window, bounds[0], bounds[1], first)
    if call.mask is not None:
        padding = call.mask.bool()[:, None, None, :]
        kept = padding if kept is None else kept & padding
    return as_added(kept), ""


def as_added(mask: Tensor | None) -> Tensor:
    """``mask`` in additive form, for scores ``[B, H, S, L]``: float64, with ``-inf`` where a key is masked out.

    The result has the mask's shape, which broadcasts. Without a mask it is a scalar 0: every query sees every key.
    """
    if mask is None:
        return torch.zeros((), dtype=torch.float64)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    return mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))


def _is_causal(call: AttentionCall) -> bool | None:
    given = call.options.get("is_causal")
    return given if given is not None else getattr(call.module, "is_causal", None)


def _names(*options: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys(name for each in options for name in each):
        if name not in _NOT_COMPARED and name not in _BOUNDS and not name.startswith("max_length"):
            yield name


def _alike(one: AttentionCall, other: AttentionCall, name: str) -> bool:
    mine, theirs = one.options.get(name), other.options.get(name)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.shape == theirs.shape and torch.equal(mine, theirs)
    if isinstance(mine, Sequence | Tensor) or isinstance(theirs, Sequence | Tensor):
        return type(mine) is type(theirs) and str(mine) == str(theirs)
    return bool(mine == theirs) if mine is None or theirs is None or isinstance(mine, bool | int | float) else True
