"""selective_scan: the state-space recurrence of Mamba 1 over a whole sequence, with boundaries of packed sequences.

The call is that of transformers' ``mamba_selective_scan`` and the package mamba-ssm's ``selective_scan_fn``. A site's
``sizes``: ``channels`` and ``state_width``, where the model states them. Tokens that are decoded one at a time go
through the model's own function, which is not this op.

Shape suffixes: ``B`` batch, ``I`` channels, ``S`` sequence, ``N`` state width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import LAYOUTS, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, compute_dtype, leaf
from veomni_ops.memory_places import alone
from veomni_ops.recurrence_tolerances import GRADIENTS, VALUES, present


def standard(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Decays and adds to a state ``h[N]`` of each channel, token by token, in float32.

    For token ``t`` with the time step ``s``, the new state is ``h = exp(s * A) * h + s * x[t] * B[t]``, and the output
    is ``(h @ C[t] + D * x[t]) * silu(z[t])``. The time step is ``dt[t] + dt_bias``, then its softplus.

    Args:
        x: ``[B, I, S]``.
        dt: ``[B, I, S]``.
        A: ``[I, N]``, below 0, mostly in float32.
        B: what a token writes to the states of all channels ``[B, N, S]``.
        C: what a token reads of them, of B's shape.
        D: ``[I]``, how much of ``x`` is added to the output; ``None`` for nothing.
        z: the gate ``[B, I, S]``; ``None`` for none.
        dt_bias: ``[I]``, added to ``dt``; ``None`` for nothing.
        initial_states: ``[B, I, N]``, the states before the first token of each row; zeros by default.
        dt_softplus: whether the softplus of a time step is taken.
        return_final_states: whether the states after the last token of each row are returned.
        seq_idx: integers ``[B, S]`` >= 0, the number of each token's packed sequence. The states are zero where a
            number differs from the one before it.

    Returns:
        The output ``[B, I, S]`` in float32 for any input, as transformers' function gives it, and the final states
        ``[B, I, N]`` in float32, or ``None`` (both in float64 for float64 ``x``). Gradients of all floating-point
        tensors, from both.

    Raises:
        ValueError: shapes don't fit together (:func:`check_call`).

    Example:
        >>> one = torch.ones(1, 1, 3)  # three tokens of one channel; each step halves the state and adds 1
        >>> call = {"dt": one, "A": torch.tensor([[0.5]]).log(), "B": one, "C": one}
        >>> output, state = standard(one, **call, return_final_states=True)
        >>> output.flatten(), state.flatten()
        (tensor([1.0000, 1.5000, 1.7500]), tensor([1.7500]))
        >>> standard(one, **call, seq_idx=torch.tensor([[0, 0, 1]]))[0].flatten()  # the third token begins anew
        tensor([1.0000, 1.5000, 1.0000])
    """
    check_call(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx)
    wide, (batch, channels, length) = compute_dtype(x), x.shape
    values, steps = x.to(wide), dt.to(wide)
    if dt_bias is not None:
        steps = steps + dt_bias.to(wide)[:, None]
    if dt_softplus:
        steps = F.softplus(steps)
    # Of each token [B, I, N], unbound at once: the gradient of one that is selected has the size of the sequence.
    decays = (steps[..., None] * A.to(wide)[:, None]).exp().unbind(2)
    added = ((steps * values)[..., None] * B.to(wide).mT[:, None]).unbind(2)
    if initial_states is None:
        state = values.new_zeros(batch, channels, A.shape[1])
    else:  # a copy: of no tokens it is the final state too
        state = initial_states.to(wide, copy=True)
    begins = None if seq_idx is None else seq_idx.diff(dim=1, prepend=seq_idx[:, :1]) != 0
    states = []
    for t in range(length):
        if begins is not None:
            state = state.masked_fill(begins[:, t, None, None], 0.0)
        state = torch.addcmul(added[t], state, decays[t])
        states.append(state)
    output = (torch.stack(states, dim=2) * C.to(wide).mT[:, None]).sum(-1) if states else values * 0.0
    if D is not None:
        output = output + D.to(wide)[:, None] * values
    if z is not None:
        output = output * F.silu(z.to(wide))
    return output, state if return_final_states else None


def check_call(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> None:
    """Check that the inputs of a call fit together. A kernel calls it first. It reads shapes and dtypes, and no values.

    Takes what :func:`standard` does.

    Raises:
        ValueError: a shape doesn't fit to the others, or ``seq_idx`` is not one integer per token.

    Example:
        >>> x, A, B = torch.zeros(1, 4, 7), torch.zeros(4, 16), torch.zeros(1, 16, 7)
        >>> check_call(x, x, A, B, B)
        >>> check_call(x, x, A, B.mT, B)
        Traceback (most recent call last):
            ...
        ValueError: selective_scan: B is [1, 7, 16]; give [1, 16, 7]
    """
    if x.dim() != 3 or A.dim() != 2:
        raise ValueError(f"selective_scan: x is {list(x.shape)} and A {list(A.shape)}; give [B, I, S] and [I, N]")
    (batch, channels, length), state = x.shape, A.shape[1]
    for name, given, wanted in (
        ("dt", dt, [batch, channels, length]),
        ("A", A, [channels, state]),
        ("B", B, [batch, state, length]),
        ("C", C, [batch, state, length]),
        ("D", D, [channels]),
        ("z", z, [batch, channels, length]),
        ("dt_bias", dt_bias, [channels]),
        ("initial_states", initial_states, [batch, channels, state]),
        ("seq_idx", seq_idx, [batch, length]),
    ):
        if given is not None and list(given.shape) != wanted:
            raise ValueError(f"selective_scan: {name} is {list(given.shape)}; give {wanted}")
    if seq_idx is not None and seq_idx.is_floating_point():
        raise ValueError(
            f"selective_scan: seq_idx is {seq_idx.dtype}; give integers, the number of each token's sequence"
        )


class _Problems:
    """Draws the arguments of calls."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self._draw = device, Draw(device, dtype, seed)

    def call(
        self, batch: int, length: int, channels: int = 6, state: int = 8, decay: float = 0.5
    ) -> tuple[Tensor, ...]:
        """``x``, ``dt``, ``A``, ``B`` and ``C``."""
        draw = self._draw.normal
        x, dt = draw(batch, channels, length), draw(batch, channels, length)
        A = -(draw(channels, state).abs().float() * decay + 0.1 * decay)
        B, C = (draw(batch, state, length, scale=state**-0.5) for _ in range(2))
        return leaf(x), leaf(dt), leaf(A), leaf(B), leaf(C)

    def gated(self, batch: int, length: int, channels: int = 6) -> dict[str, Any]:
        """``D``, a gate, and a bias with which most time steps are below 1, as in a model."""
        D, bias = self._draw.normal(channels), self._draw.normal(channels, scale=0.3, shift=-1.0)
        z = self._draw.normal(batch, channels, length)
        return {"D": leaf(D), "z": leaf(z), "dt_bias": leaf(bias), "dt_softplus": True}

    def states(self, batch: int, channels: int = 6, state: int = 8) -> dict[str, Any]:
        """Initial states in float32, and that final ones are wanted."""
        initial = leaf(self._draw.normal(batch, channels, state).float())
        return {"initial_states": initial, "return_final_states": True}

    def packed(self, *rows: list[int]) -> Tensor:
        """``seq_idx`` with one row for each list of lengths."""
        numbers = [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in rows]
        return torch.stack(numbers).to(self.device, torch.int32)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    yield Sample("odd sizes", problems.call(3, 13, 5, 7), problems.gated(3, 13, 5))
    yield Sample("both states", problems.call(2, 19), {**problems.gated(2, 19), **problems.states(2)})
    packed = {"seq_idx": problems.packed([1, 8, 1, 5, 9], [24], [23, 1]), **problems.gated(3, 24)}
    yield Sample("packed, both states", problems.call(3, 24), {**packed, **problems.states(3)})
    x, dt, *others = problems.call(1, 17)
    positive = (x, leaf(dt.detach().sigmoid()), *others)
    yield Sample("time steps as they come", positive, {"return_final_states": True})
    call = problems.call(1, 37, 35, 16)
    yield Sample("past a tile of channels", call, {**problems.gated(1, 37, 35), "return_final_states": True})
    x, dt, A, *others = (leaf(each.detach().mT.contiguous().mT) for each in problems.call(2, 10))
    gated = problems.gated(2, 10)
    gated["z"] = leaf(gated["z"].detach().mT.contiguous().mT)
    yield Sample("channels last in memory", (x, dt, leaf(A.detach().contiguous()), *others), gated)
    yield from _edges(_Problems(device, dtype, seed=3))


def _edges(problems: _Problems) -> Iterator[Sample]:
    """Lengths around chunks of 8 to 64 tokens, boundaries on and beside them, and decays from none to all."""

    def edge(name: str, call: tuple[Tensor, ...], **options: Any) -> Sample:
        batch, _, length = call[0].shape
        given = {**problems.gated(batch, length), **problems.states(batch), **options}
        return Sample(name, call, given, values_only=True)

    for length in (1, 2, 7, 8, 9, 63, 64, 65, 129):
        yield edge("1 token" if length == 1 else f"{length} tokens", problems.call(1, length))
    yield edge("no tokens", problems.call(2, 0))
    for lengths in ([64, 64, 1, 2, 3], [63, 1, 1, 66], [1] * 20):
        packed = problems.packed(lengths)
        yield edge(f"packed, of {', '.join(map(str, lengths))}", problems.call(1, sum(lengths)), seq_idx=packed)
    yield edge("one sequence whose number is 3", problems.call(1, 21), seq_idx=problems.packed([21]).long() + 3)
    numbers = torch.tensor([7, 0, 7, 900, 5, 0], device=problems.device)  # int64; some come back
    order = numbers[problems.packed([7, 20, 1, 6, 2, 4]).long()]
    yield edge("packed, initial states alone", problems.call(1, 40), seq_idx=order, return_final_states=False)
    yield edge("packed, final states alone", problems.call(1, 40), seq_idx=order, initial_states=None)
    yield edge("large decay", problems.call(2, 70, decay=30.0))
    x, dt, A, B, C = problems.call(1, 70)
    sudden = dt.detach().clone()
    sudden[..., 5::9] = 200.0  # nearly everything is forgotten here, and what comes after is as exact as ever
    yield edge("forgets at once", (x, leaf(sudden), A, B, C))
    yield edge("no decay", (x, dt, leaf(torch.zeros_like(A)), B, C), dt_bias=None)
    above = leaf(dt.detach().sigmoid() + 2.0)  # so that each is above 0 with its bias: others let a state grow
    yield edge("time steps as they come, and a bias", (x, above, A, B, C), dt_softplus=False)
    yield edge("without D and a gate", problems.call(2, 20), D=None, z=None)
    yield edge("one column", problems.call(3, 5, state=1), initial_states=None)
    x, dt, A, B, _ = problems.call(1, 12)
    x, dt, B = map(alone, (x, dt, B))
    yield edge("reads what it writes", (x, dt, A, B, B))
    yield edge("D without a gate", problems.call(2, 9), z=None)
    yield edge("packed, a gate without D", problems.call(1, 12), D=None, seq_idx=problems.packed([5, 7]))
    x, dt, *others = problems.call(1, 12)
    call, packed = (x, leaf(dt.detach().sigmoid() + 2.0), *others), problems.packed([5, 7])
    yield edge("packed, time steps as they come, and a bias", call, dt_softplus=False, seq_idx=packed)
    yield edge("packed, of 1, 3, 14, 2", problems.call(1, 20), seq_idx=problems.packed([1, 3, 14, 2]))


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    call = problems.call(1, 35, 70, 33)
    given = {**problems.gated(1, 35, 70), **problems.states(1, 70, 33)}
    yield Sample("33 columns of a state", call, given)
    packed = {"seq_idx": problems.packed([3, 321, 1, 2, 3]), **problems.gated(1, 330, 130)}
    yield Sample("packed, many chunks", problems.call(1, 330, 130, 16, decay=0.05), packed)
    past = problems.call(1, 2100, 4, decay=0.05)
    yield Sample("past 2048 tokens", past, problems.gated(1, 2100, 4), values_only=True)

    def make(
        batch: int, length: int, sizes: tuple[int, int], packed: str, states: str, layout: str, **given: bool
    ) -> Sample:
        x, dt, A, B, C = problems.call(batch, length, *sizes, decay=0.1)
        dt = dt if given["dt_softplus"] else leaf(dt.detach().sigmoid() + 2.0)  # above 0 with a bias too
        options = problems.gated(batch, length, sizes[0])
        x, dt, B, C, options["z"] = (laid_out(each.detach(), layout) for each in (x, dt, B, C, options["z"]))
        options = {name: each for name, each in options.items() if given[name]}
        kept = problems.states(batch, *sizes)
        options |= {name: each for name, each in kept.items() if name.split("_")[-2] in states}
        if packed != "not":
            rows = [[3, 1, length - 4], [length], [1, length - 1]][:batch]
            options["seq_idx"] = problems.packed(*rows).to(getattr(torch, packed)) * 5
        return Sample("", (x, dt, A, B, C), options)

    shapes = {"batch": (1, 3), "length": (5, 70, 128), "sizes": ((6, 8), (40, 16), (3, 24))}
    kinds = {"packed": ("not", "int32", "int64"), "states": ("none", "initial", "final", "initial and final")}
    optional = dict.fromkeys(("D", "z", "dt_bias", "dt_softplus"), (True, False))
    yield from together(make, **shapes, **kinds, **optional, layout=LAYOUTS)
    packed = {"seq_idx": problems.packed([256, 256, 65]), **problems.gated(1, 577, 4)}
    yield Sample("sequences of 256", problems.call(1, 577, 4, decay=0.05), packed, values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    packed = {"seq_idx": problems.packed([17, 707, 303]), **problems.gated(1, 1027, 1536)}
    call = problems.call(1, 1027, 1536, 16, decay=0.1)
    yield Sample("a model's channels, packed", call, {**packed, **problems.states(1, 1536, 16)})


CONTRACTS = {
    "standard": Contract(
        op_name="selective_scan",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        primary=present,
        rows=("x", "dt", "B", "C", "z", "initial_states", "seq_idx"),
        ranges={"A": (-math.inf, 0.0)},  # models have -exp(A_log), with which a state decays
    ),
}
