"""The calls on which kernels of delta rules are compared with the recurrence, and how closely.

Both ops have the same ones. They differ in the decay: one number per token and head, or one per key channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from veomni_ops.combinations import CONTIGUOUS, EVERY_OTHER, laid_out, together
from veomni_ops.contract import Alike, Contract, Draw, Sample, leaf
from veomni_ops.memory_places import alone
from veomni_ops.recurrence_tolerances import GRADIENTS, VALUES, present

# A feature: keys or values wider than 128. A kernel may have room for a state of 128 by 128 alone.
WIDE_HEADS, WIDEST_HEAD = "wide_heads", 128
# A state that decays, and corrections that add up. With g above 0 or beta below it the state grows with every token, as
# do the triangular systems of chunked kernels. What float32 rounds away is then a matter of the order of sums.
RANGES = {"g": (-math.inf, 0.0), "beta": (0.0, math.inf)}
_NORMED: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}


@dataclass(frozen=True)
class DeltaRuleSamples:
    """The samples of one op.

    Args:
        per_channel: whether its decay has a number per key channel.

    Example:
        >>> sample = next(DeltaRuleSamples(per_channel=True).small(torch.device("cpu"), torch.float32))
        >>> query, key, value, g, beta = sample.args
        >>> sample.name, g.shape, beta.shape
        ('odd sizes', torch.Size([3, 13, 3, 7]), torch.Size([3, 13, 3]))
    """

    per_channel: bool

    def small(self, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """Of all kinds, each with its gradients; then :meth:`_edges`."""
        draw = Draw(device, dtype)
        yield Sample("odd sizes", self._problem(draw, 3, 13, (3, 3), (7, 5)), _NORMED)
        kept = {**_NORMED, "output_final_state": True}
        yield Sample("both states", self._problem(draw, 2, 19), {"initial_state": _state(draw, 2), **kept})
        ends = (1, 9, 9, 12, 13, 24)
        packed = {"cu_seqlens": _bounds_at(device, *ends), "initial_state": _state(draw, len(ends)), **kept}
        yield Sample("packed, both states", self._problem(draw, 1, 24), packed)
        yield Sample("grouped heads", self._problem(draw, 2, 11, (1, 8), (8, 6)), _NORMED)
        yield Sample("no l2 norm", self._problem(draw, 2, 17, key_scale=0.3), {"output_final_state": True})
        yield Sample("past a chunk", self._problem(draw, 1, 67, (1, 1)), kept)
        wide = [leaf(x.detach().repeat_interleave(2, dim=1)[:, ::2]) for x in self._problem(draw, 2, 10)]
        yield Sample("every other token", tuple(wide), _NORMED)
        transposed = [leaf(x.detach().transpose(1, 2).contiguous().transpose(1, 2)) for x in self._problem(draw, 2, 9)]
        yield Sample("heads before tokens in memory", tuple(transposed), _NORMED)
        yield from self._edges(device, dtype)

    def _edges(self, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """Lengths around chunks of 16, 32 and 64 tokens, boundaries on and beside them, and decays from none to all."""
        draw = Draw(device, dtype, seed=3)

        def edge(name: str, problem: tuple[Tensor, ...], **options: Any) -> Sample:
            return Sample(name, problem, {**_NORMED, **options}, values_only=True)

        unnormed: dict[str, Any] = {"use_qk_l2norm_in_kernel": False}
        of_length: dict[int, dict[str, Any]] = {16: unnormed, 33: {"scale": 0.7}}
        for length in (1, 2, 16, 33, 63, 64, 65, 129):
            kept = {"initial_state": _state(draw, 1), "output_final_state": True, **of_length.get(length, {})}
            problem = self._problem(draw, 1, length, key_scale=0.3 if length == 16 else 1.0)
            yield edge("1 token" if length == 1 else f"{length} tokens", problem, **kept)
        yield edge("no tokens", self._problem(draw, 2, 0), initial_state=_state(draw, 2), output_final_state=True)
        at: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
            ((64, 128, 128, 129, 133, 136), {}),
            ((63, 64, 65, 131), {"scale": 0.7}),
            ((1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 70), {}),
            ((0, 5, 5, 40, 40), unnormed),
        )
        for ends, options in at:
            bounds, states = _bounds_at(device, *ends), _state(draw, len(ends))
            problem = self._problem(draw, 1, ends[-1], key_scale=0.3 if options == unnormed else 1.0)
            kept = {"cu_seqlens": bounds, "initial_state": states, "output_final_state": True, **options}
            yield edge(f"packed at {', '.join(map(str, ends))}", problem, **kept)
        bounds = _bounds_at(device, 21, dtype=torch.int64)
        yield edge("one packed sequence", self._problem(draw, 1, 21), cu_seqlens=bounds)
        bounds = _bounds_at(device, 30, 75)
        yield edge("packed without states", self._problem(draw, 1, 75, decay=8.0), cu_seqlens=bounds)
        yield edge("packed, grouped heads", self._problem(draw, 1, 40, (1, 3)), cu_seqlens=_bounds_at(device, 7, 40))
        # Models give no state and want the last one where they fill a cache, and the reverse where they go on from one.
        ends = (5, 6, 6, 9, 12, 20)
        bounds, states = _bounds_at(device, *ends), _state(draw, len(ends))
        yield edge(
            "packed, an initial state alone", self._problem(draw, 1, 20), cu_seqlens=bounds, initial_state=states
        )
        yield edge(
            "packed, a final state alone", self._problem(draw, 1, 20), cu_seqlens=bounds, output_final_state=True
        )
        yield edge("an initial state alone", self._problem(draw, 3, 18, (1, 3)), initial_state=_state(draw, 3, 3))
        kept = {"initial_state": _state(draw, 2), "output_final_state": True}
        yield edge("large decay", self._problem(draw, 2, 70, decay=30.0), **kept)
        q, k, v, g, beta = self._problem(draw, 1, 70)
        kept = {"initial_state": _state(draw, 1), "output_final_state": True}
        sudden = g.detach().clone()
        sudden[:, 5::9] = -500.0  # everything is forgotten here, and what comes after is as exact as ever
        yield edge("forgets at once", (q, k, v, leaf(sudden), beta), **kept)
        if self.per_channel:
            some = g.detach().clone()
            some[:, 5::9, :, ::2] = -500.0
            some[..., 1] = 0.0
            yield edge("some channels forget at once, and one nothing", (q, k, v, leaf(some), beta), **kept)
        all_or_nothing = beta.detach().clone()
        all_or_nothing[:, ::3], all_or_nothing[:, 1::3] = 0.0, 1.0
        kept = {"output_final_state": True}
        yield edge("no decay", (q, k, v, leaf(torch.zeros_like(g)), leaf(all_or_nothing)), **kept)
        yield edge("beta up to 2", (q, k, v, g, leaf(beta.detach() * 2)), output_final_state=True)
        q, k, *others = self._problem(draw, 2, 12)
        q, k = (leaf(x.detach() * 1e-3) for x in (q, k))  # where the norm's eps counts
        with torch.no_grad():
            q[:, 3], k[:, 5] = 0.0, 0.0
        yield edge("another scale, and small keys", (q, k, *others), scale=0.7)
        narrow = self._problem(draw, 2, 20, widths=(12, 3))
        yield edge("values narrower than keys", narrow, output_final_state=True, scale=0.3)
        yield edge("values wider than keys", self._problem(draw, 2, 20, widths=(4, 24)), output_final_state=True)
        # The norm of a single number is its sign: its gradient is rounding noise, and too small to compare.
        one = self._problem(draw, 3, 5, widths=(1, 1), key_scale=0.5)
        yield edge("one column", one, output_final_state=True, use_qk_l2norm_in_kernel=False)
        q, _, *others = map(alone, self._problem(draw, 1, 12))
        yield edge("queries that are the keys", (q, q, *others), scale=0.7)
        for ends in ((3, 20), (7, 20), tuple(range(1, 21))):  # as many boundaries of as many tokens, elsewhere
            kept = {"cu_seqlens": _bounds_at(device, *ends), "initial_state": _state(draw, len(ends), 4)}
            name = f"four heads of two keys, {len(ends)} packed sequences, the first of {ends[0]}"
            yield edge(name, self._problem(draw, 1, 20, (2, 4)), output_final_state=True, **kept)
        kept = {"cu_seqlens": _bounds_at(device, 7, 20, 20, 20), "initial_state": _state(draw, 4)}
        yield edge("two empty sequences at the end", self._problem(draw, 1, 20), output_final_state=True, **kept)

    def beyond_a_tile(self, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """Wider than a tile of a kernel, and longer than a few chunks."""
        draw = Draw(device, dtype)
        kept = {**_NORMED, "output_final_state": True}
        wide = self._problem(draw, 1, 35, (1, 2), (136, 144))
        yield Sample("past 128 columns", wide, kept, needs=(WIDE_HEADS,))
        yield Sample("128 columns", self._problem(draw, 1, 33, (1, 2), (128, 128)), kept)
        bounds, states = _bounds_at(device, 3, 3, 324, 325, 327, 330), _state(draw, 6, 2, 24, 40)
        problem = self._problem(draw, 1, 330, (1, 2), (24, 40), decay=0.05)
        yield Sample("packed, six chunks", problem, {"cu_seqlens": bounds, "initial_state": states, **kept})

        def make(
            batch: int,
            length: int,
            heads: tuple[int, int],
            widths: tuple[int, int],
            states: str,
            norm: bool,
            scale: float | None,
            packed: str,
            layout: str,
        ) -> Sample:
            call = [
                laid_out(each.detach(), layout)
                for each in self._problem(draw, batch, length, heads, widths, 0.1, 0.1 if not norm else 1.0)
            ]
            options: dict[str, Any] = {
                "use_qk_l2norm_in_kernel": norm,
                "scale": scale,
                "output_final_state": "final" in states,
            }
            ends = (0, 3, length - 1, length)
            if packed != "not":
                options["cu_seqlens"] = _bounds_at(device, *ends, dtype=getattr(torch, packed))
            if "initial" in states:
                options["initial_state"] = _state(draw, batch if packed == "not" else len(ends), heads[1], *widths)
            return Sample("", tuple(call), options)

        shapes = {"length": (5, 70, 128), "heads": ((2, 2), (1, 3)), "widths": ((8, 8), (16, 24), (80, 40))}
        kinds = {
            "states": ("none", "initial", "final", "initial and final"),
            "norm": (True, False),
            "scale": (None, 0.3),
        }
        for batches, packed in (((1, 3), ("not",)), ((1,), ("int32", "int64"))):
            yield from together(make, batch=batches, **shapes, **kinds, packed=packed, layout=(CONTIGUOUS, EVERY_OTHER))
        # The states of most models, for which kernels have paths of their own; and more boundaries than a tile has.
        of_models: tuple[tuple[str, int, int, Sequence[int]], ...] = (
            ("two rows, 128 columns, initial states", 2, 128, ()),
            ("packed, 128 columns, initial states", 1, 128, (3, 19)),
            ("70 packed sequences", 1, 8, range(2, 141, 2)),
        )
        for name, batch, width, ends in of_models:
            heads = 2 if width == 128 else 1
            problem = self._problem(draw, batch, ends[-1] if ends else 19, (1, heads), (width, width))
            options = {"cu_seqlens": _bounds_at(device, *ends)} if ends else {}
            if width == 128:
                options["initial_state"] = _state(draw, len(ends) or batch, heads, width, width)
            yield Sample(name, problem, {**kept, **options}, values_only=True)
        draw = Draw(device, dtype, seed=9)
        for width in (64, 128):
            states = _state(draw, 2, 2, width, width)
            for name, scale, given in (
                ("another scale", 1.0, {**kept, "scale": 0.3}),
                ("no l2 norm", 0.08, {"output_final_state": True}),
                ("parts of one projection, initial states", 1.0, {**kept, "initial_state": states}),
            ):
                q, k, v, *gates = self._problem(draw, 2, 19, (1, 2), (width, width), key_scale=scale)
                if "parts" in name:
                    q, k, v = (leaf(torch.cat((x, x), 2).detach()[:, :, : x.shape[2]]) for x in (q, k, v))
                yield Sample(f"{width} columns, {name}", (q, k, v, *gates), given, values_only=True)
        problem = self._problem(draw, 1, 390, (1, 1), decay=0.05)
        yield Sample("seven chunks", problem, {**kept, "initial_state": _state(draw, 1, 1)}, values_only=True)

    def large(self, device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """As a model has them."""
        draw = Draw(device, dtype)
        kept = {**_NORMED, "output_final_state": True}
        yield Sample("a model's heads", self._problem(draw, 1, 1027, (2, 4), (128, 128), decay=0.05), kept)
        problem = self._problem(draw, 1, 2051, (1, 2), (128, 128), decay=0.01)
        yield Sample("packed, long", problem, {"cu_seqlens": _bounds_at(device, 17, 1400, 2051), **kept})

    def _problem(
        self,
        draw: Draw,
        batch: int,
        length: int,
        heads: tuple[int, int] = (2, 2),
        widths: tuple[int, int] = (8, 8),
        decay: float = 0.5,
        key_scale: float = 1.0,
    ) -> tuple[Tensor, ...]:
        """Query, key, value, g and beta. Without l2 norm, keys longer than 1 make the state grow: see ``key_scale``."""
        (key_heads, value_heads), (key_width, value_width) = heads, widths
        q = draw.normal(batch, length, key_heads, key_width)
        k = draw.normal(batch, length, key_heads, key_width, scale=key_scale)
        v = draw.normal(batch, length, value_heads, value_width)
        g = -draw.normal(batch, length, *self._of_decay(value_heads, key_width), scale=decay).abs().float()
        beta = draw.normal(batch, length, value_heads).sigmoid()
        return leaf(q), leaf(k), leaf(v), leaf(g), leaf(beta)

    def _of_decay(self, heads: int, key_width: int) -> tuple[int, ...]:
        return (heads, key_width) if self.per_channel else (heads,)


def alike(sample: Sample, features: Collection[str]) -> Iterator[Alike]:
    """Other layouts of rows: cut off, packed, padded on the left, and with the last token after the state before it.

    Example:
        >>> sample = next(DeltaRuleSamples(per_channel=False).small(torch.device("cpu"), torch.float32))
        >>> [each.words for each in alike(sample, ())][:2]
        ['where later tokens are cut off', 'where its rows are packed']
    """
    options = dict(sample.kwargs)
    batch, length = sample.args[0].shape[:2]
    if options.get("cu_seqlens") is not None or length < 2 or not batch:
        return
    inputs, initial = [each.detach() for each in sample.args], options.pop("initial_state", None)
    states = {} if initial is None else {"initial_state": initial.detach()}

    def call(changed: Iterable[Tensor], **others: Any) -> Sample:
        return replace(sample, args=tuple(changed), kwargs={**options, **states, **others})

    def packed(parts: Sequence[Sequence[Tensor]], **others: Any) -> Sample:
        """The rows of each part, one behind the other, in one row."""
        lengths = [part[0].shape[1] for part in parts for _ in range(batch)]
        joined = (torch.cat([each.flatten(0, 1) for each in same])[None] for same in zip(*parts, strict=True))
        given = {name: torch.cat([state] * len(parts)) for name, state in states.items()}
        bounds = _bounds_at(inputs[0].device, *accumulate(lengths))
        return call(joined, cu_seqlens=bounds, **given, **others)

    whole, cut = call(inputs), max(length // 2, 1)
    half = call(each[:, :cut] for each in inputs)
    yield Alike("where later tokens are cut off", (whole, half), (lambda y: y[:, :cut], lambda y: y))
    yield Alike(
        "where its rows are packed",
        (whole, packed([inputs])),
        (lambda y: y, lambda y: y.view(batch, length, *y.shape[2:])),
    )
    if initial is None:
        q, k, v, *gates = inputs
        before = [torch.zeros_like(each[:, :cut]) for each in (q, k, v)] + [each[:, -cut:] for each in gates]
        longer = [torch.cat(each, dim=1) for each in zip(before, inputs, strict=True)]
        yield Alike("where it is padded with zeros", (whole, call(longer)), (lambda y: y, lambda y: y[:, cut:]))
    at = length - 1
    both = packed([[each[:, :at] for each in inputs], inputs], output_final_state=True)

    def last(results: tuple[Tensor, ...]) -> Sample:
        return call((each[:, at:] for each in inputs), initial_state=results[1][:batch])

    words = "where its last token comes after the state before it"
    yield Alike(
        words, (both, last), (lambda y: y[0, batch * at :].view(batch, length, *y.shape[2:])[:, at:], lambda y: y)
    )


def _state(draw: Draw, sequences: int, heads: int = 2, key_width: int = 8, value_width: int = 8) -> Tensor:
    return leaf(draw.normal(sequences, heads, key_width, value_width).float())


def _bounds_at(device: torch.device, *ends: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor((0, *ends), dtype=dtype, device=device)


def contract(op_name: str, reference: Callable[..., Any], per_channel: bool) -> Contract:
    """The contract of the delta rule ``op_name``, which both have in common but for the decay.

    Example:
        >>> from veomni_ops.kda import standard
        >>> contract("kda", standard, per_channel=True).rows[:2]
        ('query', 'key')
    """
    samples = DeltaRuleSamples(per_channel)
    return Contract(
        op_name=op_name,
        variant="standard",
        reference=reference,
        samples=samples.small,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=samples.beyond_a_tile,
        large=samples.large,
        primary=present,
        # The boundaries of packed sequences are not one per row. Named here, they leave packed calls without rows.
        rows=("query", "key", "value", "g", "beta", "initial_state", "cu_seqlens"),
        alike=alike,
        ranges=RANGES,
    )
