"""mamba2_scan: the state-space recurrence of Mamba 2 over a whole sequence, with boundaries of packed sequences.

The call is that of transformers' ``mamba2_chunk_scan`` and the package mamba-ssm's, without their chunk size, which no
result depends on. A site's ``sizes``: ``heads``, ``head_width``, ``groups`` and ``state_width``, where the model states
them. Tokens that are decoded one at a time go through the model's own function, which is not this op.

Shape suffixes: ``B`` batch, ``S`` sequence, ``H`` heads, ``P`` head width, ``G`` groups, ``N`` state width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import CONTIGUOUS, EVERY_OTHER, together
from veomni_ops.contract import Contract, Draw, Sample, compute_dtype, leaf
from veomni_ops.memory_places import alone
from veomni_ops.recurrence_tolerances import GRADIENTS, VALUES, present

UNLIMITED = (0.0, math.inf)


def standard(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = UNLIMITED,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decays and adds to a state ``h[P, N]`` of each head, token by token, in float32.

    For token ``t`` with the time step ``s``, the new state is ``h = exp(s * A) * h + s * x[t] (x) B[t]``, and the
    output is ``h @ C[t] + D * x[t]``. The time step is ``dt[t] + dt_bias``, then its softplus, then clamped to
    ``dt_limit``.

    Args:
        x: ``[B, S, H, P]``.
        dt: ``[B, S, H]``.
        A: ``[H]``, below 0, mostly in float32.
        B: what a token writes to the state ``[B, S, G, N]``. Each group serves ``H / G`` neighbouring heads.
        C: what a token reads of the state, of B's shape.
        D: ``[H]``, how much of ``x`` is added to the output; ``None`` for nothing.
        dt_bias: ``[H]``, added to ``dt``; ``None`` for nothing.
        initial_states: ``[B, H, P, N]``, the state before the first token of each row; zeros by default.
        dt_softplus: whether the softplus of a time step is taken.
        dt_limit: the smallest and the largest time step.
        return_final_states: whether the state after the last token of each row is returned.
        seq_idx: integers ``[B, S]`` >= 0, the number of each token's packed sequence. The state is zero where a
            number differs from the one before it.

    Returns:
        The output ``[B, S, H, P]`` in float32 for any input, as transformers' function gives it, and the final states
        ``[B, H, P, N]`` in float32, or ``None`` (both in float64 for float64 ``x``). Gradients of all floating-point
        tensors, from both.

    Raises:
        ValueError: shapes don't fit together (:func:`check_call`).

    Example:
        >>> one = torch.ones(1, 3, 1, 1)  # three tokens of a head of width 1; each step halves the state and adds 1
        >>> call = {"dt": torch.ones(1, 3, 1), "A": torch.tensor([0.5]).log(), "B": one, "C": one}
        >>> output, state = standard(one, **call, return_final_states=True)
        >>> output.flatten(), state.flatten()
        (tensor([1.0000, 1.5000, 1.7500]), tensor([1.7500]))
        >>> standard(one, **call, seq_idx=torch.tensor([[0, 0, 1]]))[0].flatten()  # the third token begins anew
        tensor([1.0000, 1.5000, 1.0000])
    """
    check_call(x, dt, A, B, C, D, dt_bias, initial_states, dt_limit, seq_idx)
    wide, (batch, length, heads, width) = compute_dtype(x), x.shape
    values, steps = x.to(wide), dt.to(wide)
    writes, reads = (each.to(wide).repeat_interleave(heads // each.shape[2], dim=2) for each in (B, C))
    if dt_bias is not None:
        steps = steps + dt_bias.to(wide)
    if dt_softplus:
        steps = F.softplus(steps)
    steps = steps.clamp(*dt_limit)
    decays = (steps * A.to(wide)).exp()
    rows, size = batch * heads, B.shape[3]
    if initial_states is None:
        state = values.new_zeros(rows, width, size)
    else:  # a copy: of no tokens it is the final state too
        state = initial_states.to(wide, copy=True).reshape(rows, width, size)
    added = (values * steps[..., None])[..., None] * writes[..., None, :]
    # Of each token: what is added [B*H, P, N], and the decay [B*H, 1, 1]. Unbound at once, since the gradient of one
    # token that is selected by its index has the size of the whole sequence.
    by_token = (
        part.transpose(0, 1).reshape(length, rows, *part.shape[3:]) for part in (added, decays[..., None, None])
    )
    begins = {} if seq_idx is None else _begins(seq_idx, heads)
    states = []
    for t, (added_t, decay_t) in enumerate(zip(*(part.unbind() for part in by_token), strict=True)):
        if t in begins:
            state = state.masked_fill(begins[t], 0.0)
        state = torch.addcmul(added_t, state, decay_t)
        states.append(state)
    if states:
        # The states [S, B*H, P, N] times how each is read [S, B*H, N, 1], of all tokens at once
        output = torch.stack(states) @ reads.transpose(0, 1).reshape(length, rows, size, 1)
        output = output.reshape(length, batch, heads, width).transpose(0, 1)
    else:
        output = torch.zeros_like(values)
    state = state.reshape(batch, heads, width, size)
    if D is not None:
        output = output + D.to(wide)[:, None] * values
    return output, state if return_final_states else None


def _begins(seq_idx: Tensor, heads: int) -> dict[int, Tensor]:
    """Of each token with which a sequence begins in some row: in which ones ``[B*H, 1, 1]``, by the token's number."""
    begins = seq_idx.diff(dim=1, prepend=seq_idx[:, :1]) != 0
    by_token = begins.repeat_interleave(heads, dim=0)[..., None, None].unbind(1)
    return {t: by_token[t] for t in begins.any(0).nonzero().flatten().tolist()}


def check_call(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_limit: Sequence[float] = UNLIMITED,
    seq_idx: Tensor | None = None,
) -> None:
    """Check that the inputs of a call fit together. A kernel calls it first. It reads shapes and dtypes, and no values.

    Takes what :func:`standard` does.

    Raises:
        ValueError: a shape doesn't fit to the others, heads are not a multiple of groups, the limits of time steps are
            not two in order, or ``seq_idx`` is not one integer per token.

    Example:
        >>> x, dt, A, B = torch.zeros(1, 7, 4, 8), torch.zeros(1, 7, 4), torch.zeros(4), torch.zeros(1, 7, 2, 16)
        >>> check_call(x, dt, A, B, B)
        >>> check_call(x, dt, A, B[:, :, [0, 0, 1]], B)
        Traceback (most recent call last):
            ...
        ValueError: mamba2_scan: B is [1, 7, 3, 16] and C [1, 7, 2, 16]; give both as [1, 7, G, N]
    """
    if x.dim() != 4:
        raise ValueError(f"mamba2_scan: x is {list(x.shape)}; give [B, S, H, P]")
    batch, length, heads, width = x.shape
    if B.dim() != 4 or B.shape != C.shape or B.shape[:2] != x.shape[:2]:
        shapes = f"B is {list(B.shape)} and C {list(C.shape)}"
        raise ValueError(f"mamba2_scan: {shapes}; give both as [{batch}, {length}, G, N]")
    if not B.shape[2] or heads % B.shape[2]:
        raise ValueError(f"mamba2_scan: x has {heads} heads; give a multiple of the {B.shape[2]} groups of B and C")
    for name, given, wanted in (
        ("dt", dt, [batch, length, heads]),
        ("A", A, [heads]),
        ("D", D, [heads]),
        ("dt_bias", dt_bias, [heads]),
        ("initial_states", initial_states, [batch, heads, width, B.shape[3]]),
        ("seq_idx", seq_idx, [batch, length]),
    ):
        if given is not None and list(given.shape) != wanted:
            raise ValueError(f"mamba2_scan: {name} is {list(given.shape)}; give {wanted}")
    if seq_idx is not None and seq_idx.is_floating_point():
        raise ValueError(f"mamba2_scan: seq_idx is {seq_idx.dtype}; give integers, the number of each token's sequence")
    if len(dt_limit) != 2 or not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"mamba2_scan: dt_limit is {tuple(dt_limit)}; give the smallest and the largest time step")


class _Problems:
    """Draws the arguments of calls."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self._draw = device, Draw(device, dtype, seed)

    def call(
        self,
        batch: int,
        length: int,
        heads: tuple[int, int] = (2, 1),
        widths: tuple[int, int] = (6, 8),
        decay: float = 0.5,
    ) -> tuple[Tensor, ...]:
        """``x``, ``dt``, ``A``, ``B`` and ``C``, for ``heads`` and groups, and for head and state ``widths``."""
        draw, (number, groups), (width, state) = self._draw, heads, widths
        x = draw.normal(batch, length, number, width)
        dt = draw.normal(batch, length, number)
        A = -(draw.normal(number).abs().float() * decay + 0.1 * decay)
        B, C = (draw.normal(batch, length, groups, state, scale=state**-0.5) for _ in range(2))
        return leaf(x), leaf(dt), leaf(A), leaf(B), leaf(C)

    def of_heads(self, heads: int = 2) -> dict[str, Any]:
        """``D``, and a bias with which most time steps are below 1, as in a model."""
        D, bias = self._draw.normal(heads), self._draw.normal(heads, scale=0.3, shift=-1.0)
        return {"D": leaf(D), "dt_bias": leaf(bias), "dt_softplus": True}

    def states(self, batch: int, heads: int = 2, width: int = 6, state: int = 8) -> dict[str, Any]:
        """Initial states in float32, and that final ones are wanted."""
        initial = leaf(self._draw.normal(batch, heads, width, state).float())
        return {"initial_states": initial, "return_final_states": True}

    def packed(self, *rows: list[int]) -> Tensor:
        """``seq_idx`` with one row for each list of lengths."""
        numbers = [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in rows]
        return torch.stack(numbers).to(self.device, torch.int32)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("odd sizes", problems.call(3, 13, (3, 3), (5, 7)), problems.of_heads(3))
    yield Sample("both states", problems.call(2, 19), {**problems.of_heads(), **problems.states(2)})
    numbers = problems.packed([1, 8, 1, 5, 9], [24], [23, 1])
    packed = {"seq_idx": numbers, **problems.of_heads(4), **problems.states(3, 4)}
    yield Sample("packed, both states", problems.call(3, 24, (4, 2)), packed)
    yield Sample("heads in groups", problems.call(1, 11, (8, 2), (4, 8)), problems.of_heads(8))
    yield Sample("time steps as they come", _positive(problems.call(1, 17)), {"return_final_states": True})
    limited = {**problems.of_heads(), "dt_limit": (0.3, 0.6)}
    yield Sample("time steps at their limits", problems.call(2, 12), limited)
    yield Sample("past a chunk", problems.call(1, 67), {**problems.of_heads(), "return_final_states": True})
    wide = tuple(_every_other_token(x) if x.dim() > 1 else x for x in problems.call(2, 10))
    yield Sample("every other token", wide, problems.of_heads())
    x, dt, A, B, C = problems.call(2, 9)
    transposed = [leaf(each.detach().transpose(1, 2).contiguous().transpose(1, 2)) for each in (x, B, C)]
    yield Sample("tokens last in memory", (transposed[0], dt, A, *transposed[1:]), problems.of_heads())
    yield from _edges(_Problems(device, dtype, seed=3))


def _positive(call: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, dt, *others = call
    return x, leaf(dt.detach().sigmoid()), *others


def _every_other_token(x: Tensor) -> Tensor:
    return leaf(x.detach().repeat_interleave(2, dim=1)[:, ::2])


def _edges(problems: _Problems) -> Iterator[Sample]:
    """Lengths around chunks of 16 to 128 tokens, boundaries on and beside them, and decays from none to all."""

    def edge(name: str, call: tuple[Tensor, ...], **options: Any) -> Sample:
        batch = call[0].shape[0]
        return Sample(name, call, {**problems.of_heads(), **problems.states(batch), **options}, values_only=True)

    for length in (1, 2, 16, 33, 63, 64, 65, 129):
        yield edge("1 token" if length == 1 else f"{length} tokens", problems.call(1, length))
    yield edge("no tokens", problems.call(2, 0))
    for lengths in ([64, 64, 1, 2, 3], [63, 1, 1, 66], [1, 1, 1, 67], [1] * 20):
        call = problems.call(1, sum(lengths))
        limited = {"dt_limit": (0.2, 0.5)} if len(lengths) == 5 else {}
        yield edge(f"packed, of {', '.join(map(str, lengths))}", call, seq_idx=problems.packed(lengths), **limited)
    numbers = problems.packed([21]).long() + 3
    yield edge("one sequence whose number is 3", problems.call(1, 21), seq_idx=numbers)
    numbers = torch.tensor([7, 0, 7, 900, 5, 0], device=problems.device)  # int64; some come back
    order = numbers[problems.packed([7, 20, 1, 6, 2, 4]).long()]
    yield edge("sequences whose numbers fall", problems.call(1, 40), seq_idx=order)
    yield edge("packed, initial states alone", problems.call(1, 40), seq_idx=order, return_final_states=False)
    yield edge("packed, final states alone", problems.call(1, 40), seq_idx=order, initial_states=None)
    yield edge("initial states alone", problems.call(3, 9), return_final_states=False)
    yield edge("large decay", problems.call(2, 70, decay=30.0))
    x, dt, A, B, C = problems.call(1, 70)
    sudden = dt.detach().clone()
    sudden[:, 5::9] = 800.0  # nearly everything is forgotten here, and what comes after is as exact as ever
    yield edge("forgets at once", (x, leaf(sudden), A, B, C), dt_limit=(0.0, 200.0))
    yield edge("no decay", (x, dt, leaf(torch.zeros_like(A)), B, C), dt_bias=None)
    plain = {"dt_softplus": False, "dt_limit": (0.1, 0.9)}
    yield edge("time steps as they come, a bias and limits", _positive(problems.call(1, 12)), **plain)
    yield edge("time steps of one size", problems.call(1, 20), dt_limit=(0.25, 0.25), D=None)
    yield edge("without D and a bias", problems.call(2, 20), D=None, dt_bias=None)
    states = problems.states(3, width=1, state=1)["initial_states"]
    yield edge("one column", problems.call(3, 5, widths=(1, 1)), initial_states=states)
    x, dt, A, B, _ = problems.call(1, 12)
    x, dt, B = map(alone, (x, dt, B))
    yield edge("reads what it writes", (x, dt, A, B, B))
    yield edge("packed, of 1, 3, 14, 2", problems.call(1, 20), seq_idx=problems.packed([1, 3, 14, 2]))


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    call = problems.call(1, 35, (2, 1), (136, 144))
    yield Sample("past 128 columns", call, {**problems.of_heads(), **problems.states(1, 2, 136, 144)})
    call = problems.call(1, 33, (2, 1), (128, 128))
    yield Sample("128 columns", call, {**problems.of_heads(), "return_final_states": True})
    packed = {"seq_idx": problems.packed([3, 321, 1, 2, 3]), **problems.of_heads(4), "return_final_states": True}
    yield Sample("packed, six chunks", problems.call(1, 330, (4, 2), (24, 40), decay=0.05), packed)

    def make(
        batch: int,
        length: int,
        heads: tuple[int, int],
        widths: tuple[int, int],
        packed: str,
        states: str,
        d: bool,
        bias: bool,
        softplus: bool,
        limits: tuple[float, float],
        layout: str,
    ) -> Sample:
        x, dt, A, B, C = problems.call(batch, length, heads, widths, 0.1)
        dt = dt if softplus else _positive((x, dt))[1]
        x, dt, B, C = (_every_other_token(each.detach()) if layout == EVERY_OTHER else each for each in (x, dt, B, C))
        options = problems.of_heads(heads[0]) | {"dt_softplus": softplus, "dt_limit": limits}
        options |= {} if d else {"D": None}
        options |= {} if bias and softplus else {"dt_bias": None}
        given = problems.states(batch, heads[0], *widths)
        options |= {name: each for name, each in given.items() if name.split("_")[-2] in states}
        rows = [[3, 1, length - 4], [length], [1, length - 1]][:batch]
        numbers = {} if packed == "not" else {"seq_idx": problems.packed(*rows).to(getattr(torch, packed)) * 5}
        return Sample("", (x, dt, A, B, C), options | numbers)

    shapes = {
        "batch": (1, 3),
        "length": (5, 70, 128),
        "heads": ((2, 1), (4, 2)),
        "widths": ((6, 8), (80, 16), (24, 72)),
    }
    kinds = {"packed": ("not", "int32", "int64"), "states": ("none", "initial", "final", "initial and final")}
    yes = (True, False)
    limits = (UNLIMITED, (0.2, math.inf), (0.0, 0.4))
    yield from together(
        make, **shapes, **kinds, d=yes, bias=yes, softplus=yes, limits=limits, layout=(CONTIGUOUS, EVERY_OTHER)
    )
    # The states of most models, and counts of heads that fill no tile.
    for heads, widths in (((2, 1), (64, 128)), ((24, 8), (6, 8)), ((65, 5), (6, 8))):
        given = {**problems.of_heads(heads[0]), **problems.states(2, heads[0], *widths)}
        name = f"two rows of {heads[0]} heads, states of {widths[1]} columns"
        yield Sample(name, problems.call(2, 19, heads, widths), given, values_only=True)
    packed = {**problems.of_heads(), "seq_idx": problems.packed([3, 20, 10]), "dt_limit": (0.2, 0.6)}
    yield Sample("packed, heads of 64, limits", problems.call(1, 33, (2, 1), (64, 128)), packed)
    x, dt, A, B, C = problems.call(2, 19, (4, 2), (64, 16))
    x, B, C = (leaf(torch.cat((each, each), 2).detach()[:, :, : each.shape[2]]) for each in (x, B, C))
    given = problems.of_heads(4)
    given["D"] = leaf(given["D"].detach()[:1].expand(4))
    yield Sample("parts of one projection, one D of all heads", (x, dt, A, B, C), given, values_only=True)
    for name, given in (("past", {}), ("sequences of 256, past", {"seq_idx": problems.packed([256, 256, 65])})):
        call = problems.call(1, 577, (2, 1), decay=0.02)
        yield Sample(f"{name} 512 tokens", call, {**problems.of_heads(), **given}, values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    call = problems.call(1, 1027, (8, 2), (64, 128), decay=0.1)
    yield Sample("a model's heads", call, {**problems.of_heads(8), **problems.states(1, 8, 64, 128)})
    packed = {"seq_idx": problems.packed([17, 1383, 651]), **problems.of_heads(2), "return_final_states": True}
    yield Sample("packed, long", problems.call(1, 2051, (2, 1), (64, 128), decay=0.02), packed)


CONTRACTS = {
    "standard": Contract(
        op_name="mamba2_scan",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        primary=present,
        rows=("x", "dt", "B", "C", "initial_states", "seq_idx"),
        ranges={"A": (-math.inf, 0.0)},  # models have -exp(A_log), with which a state decays
    ),
}
