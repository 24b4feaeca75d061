"""causal_conv1d: a depthwise convolution over time that never looks ahead, and the activation after it.

``(x[B, C, S], weight[C, W], bias[C] or None, activation=None, seq_idx=None) -> [B, C, S]`` in x's dtype. Mixers of
linear-attention and state-space models run it before their recurrence (Qwen3-Next, Mamba 2), and LFM2 in place of
attention. ``x`` mostly comes as a transposed ``[B, S, C]``, and a kernel takes it with any strides. The arguments are
those of the ``causal-conv1d`` package, without its states: no model of transformers hands them over.

Widths of two to four are those of the package. Any other, as LFM3's seven, is the feature ``any_width``.

A site's ``sizes``: ``channels`` (C) and ``width`` (W). Its dtype is that of the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import together
from veomni_ops.contract import Alike, Contract, Draw, Sample, compute_dtype, leaf, tolerances
from veomni_ops.memory_places import alone

# "swish" is the package's other name of silu.
ACTIVATIONS = (None, "silu", "swish")


def standard(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """``activation(bias + sum over j < W of weight[:, W - 1 - j] * x[:, :, t - j])`` at each position ``t``.

    Positions before the first are zeros. With ``seq_idx``, so are positions of another sequence than that of ``t``. The
    sum and the activation are in float32, rounded once at the end.

    Args:
        x: ``[B, C, S]``, of any floating dtype and strides.
        weight: ``[C, W]``; the last column is that of the present position.
        bias: ``[C]``.
        activation: ``"silu"``, also called ``"swish"``, or ``None``.
        seq_idx: integers ``[B, S]`` >= 0, the number of each position's packed sequence. They don't
            decrease along a row. It has no gradient.

    Returns:
        ``[B, C, S]`` in x's dtype. Gradients reach ``x``, ``weight`` and ``bias``.

    Raises:
        ValueError: shapes that don't fit together, or another activation.

    Example:
        >>> x, weight = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[10.0, 1.0]])
        >>> standard(x, weight)  # each position, and ten times the one before it
        tensor([[[ 1., 12., 23., 34.]]])
        >>> standard(x, weight, seq_idx=torch.tensor([[0, 0, 1, 1]]))  # two sequences of two
        tensor([[[ 1., 12.,  3., 34.]]])
        >>> standard(x, weight, activation="relu")
        Traceback (most recent call last):
            ...
        ValueError: causal_conv1d: the activation is 'relu', not None, 'silu' or 'swish'
    """
    check_arguments(x, weight, bias, activation, seq_idx)
    dtype, length, width = compute_dtype(x), x.shape[-1], weight.shape[-1]
    taps = weight.to(dtype)
    total = x.to(dtype) * taps[:, -1:]
    for back in range(1, min(width, length)):
        earlier = x[..., : length - back].to(dtype) * taps[:, width - 1 - back, None]
        if seq_idx is not None:
            same = seq_idx[:, back:] == seq_idx[:, : length - back]
            earlier = torch.where(same[:, None], earlier, 0.0)
        total = total + F.pad(earlier, (back, 0))
    if bias is not None:
        total = total + bias.to(dtype)[:, None]
    return (total if activation is None else F.silu(total)).to(x.dtype)


def check_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seq_idx: Tensor | None
) -> None:
    """Refuse a call that no kernel of the op computes. It reads shapes and dtypes, and no values.

    Takes what :func:`standard` does.

    Raises:
        ValueError: shapes that don't fit together, or another activation.

    Example:
        >>> check_arguments(torch.ones(2, 3, 5), torch.ones(4, 2), None, None, None)
        Traceback (most recent call last):
            ...
        ValueError: causal_conv1d: x is [2, 3, 5] and weight [4, 2]; give x[B, C, S] and weight[C, W]
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: the activation is {activation!r}, not None, 'silu' or 'swish'")
    if x.dim() != 3 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or not weight.shape[1]:
        shapes = f"x is {list(x.shape)} and weight {list(weight.shape)}"
        raise ValueError(f"causal_conv1d: {shapes}; give x[B, C, S] and weight[C, W]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"causal_conv1d: bias is {list(bias.shape)}; give one number for each of {len(weight)} channels"
        )
    if seq_idx is not None and (seq_idx.shape != (x.shape[0], x.shape[2]) or seq_idx.is_floating_point()):
        given, wanted = f"{seq_idx.dtype} {list(seq_idx.shape)}", [x.shape[0], x.shape[2]]
        raise ValueError(f"causal_conv1d: seq_idx is {given}; give integers {wanted}, one for each position of x")


def numbered(lengths: list[int], device: torch.device) -> Tensor:
    """``seq_idx`` ``[1, sum of lengths]`` of sequences of these lengths that are packed into one row.

    Args:
        lengths: how many positions each sequence has; a sequence of none has no number.
        device: where the result is.

    Example:
        >>> numbered([2, 1, 3], torch.device("cpu"))
        tensor([[0, 0, 1, 2, 2, 2]], dtype=torch.int32)
    """
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return numbers[None].to(device)


class _Problems:
    """Draws the arguments of calls."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self._draw = device, Draw(device, dtype)

    def call(
        self, *shape: int, width: int = 4, bias: bool = False, scale: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``x`` of ``shape`` as a transposed ``[B, S, C]``, a weight, and a bias or ``None``."""
        batch, channels, length = shape
        x = self._draw.normal(batch, length, channels, scale=scale).transpose(1, 2)
        weight = leaf(self._draw.normal(channels, width, scale=width**-0.5))
        return leaf(x), weight, leaf(self._draw.normal(channels, scale=0.5)) if bias else None

    def packed(self, *rows: list[int]) -> Tensor:
        """``seq_idx`` with one row for each list of lengths."""
        return torch.cat([numbered(lengths, self.device) for lengths in rows])


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    silu = {"activation": "silu"}
    yield Sample("odd length", problems.call(3, 10, 37), silu)
    yield Sample("a bias, no activation", problems.call(2, 7, 21, width=3, bias=True))
    x, *others = problems.call(2, 12, 19, width=2, bias=True)
    yield Sample("channels before positions", (leaf(x.detach().contiguous()), *others), silu)
    packed = problems.packed([1, 9, 1, 1, 2, 15], [29], [13, 3, 13])
    yield Sample("packed", problems.call(3, 6, 29), {**silu, "seq_idx": packed})
    packed = problems.packed([2, 1, 4, 5]).long()
    yield Sample("packed, with a bias", problems.call(1, 6, 12, bias=True), {"seq_idx": packed**2})
    x, weight, _ = problems.call(2, 3 * 8, 13, width=3)
    part = slice(8, 16)
    yield Sample("a part of the channels", (leaf(x.detach()[:, part]), leaf(weight.detach()[part])))
    yield Sample("one token", problems.call(3, 8, 1, bias=True), silu)
    yield Sample("shorter than the width", problems.call(2, 8, 2), silu)
    yield Sample("no rows", problems.call(0, 8, 5), silu)
    yield Sample("seven positions", problems.call(2, 8, 19, width=7), needs=("any_width",))
    yield from _edges(problems)


def _edges(problems: _Problems) -> Iterator[Sample]:
    """Boundaries in every place, both names of one activation, and counts of one and just past 64."""
    silu = {"activation": "silu"}
    for name, lengths in (
        ("a boundary at the second token", [1, 12]),
        ("a boundary at the last token", [12, 1]),
        ("every token a sequence", [1] * 13),
        ("boundaries closer than the width", [3, 2, 3, 1, 1, 2, 1]),
    ):
        options = {**silu, "seq_idx": problems.packed(lengths)}
        yield Sample(name, problems.call(1, 5, 13, bias=len(lengths) > 2), options, values_only=True)
    rows = problems.packed([4, 9], [1, 5, 7], [2, 3, 2, 3, 3]).long() * 1000 + 7
    call = problems.call(3, 8, 13, width=3, bias=True)
    yield Sample("packed rows, numbers with gaps", call, {**silu, "seq_idx": rows}, values_only=True)
    two = {"activation": "swish", "seq_idx": problems.packed([1, 1])}
    yield Sample("two sequences of one token", problems.call(1, 5, 2, bias=True), two, values_only=True)
    whole = {**silu, "seq_idx": problems.packed([9], [9]) + 3}
    yield Sample("one sequence whose number is 3", problems.call(2, 5, 9), whole, values_only=True)
    any_width = ("any_width",)
    one = problems.call(2, 5, 9, width=1, bias=True)
    yield Sample("one position", one, silu, any_width, values_only=True)
    packed = {**silu, "seq_idx": problems.packed([5, 1, 9])}
    wide = problems.call(1, 6, 15, width=6, bias=True)
    yield Sample("six positions, packed", wide, packed, any_width, values_only=True)
    yield Sample("large values", problems.call(2, 5, 9, scale=50.0), silu, values_only=True)
    x, weight, bias = problems.call(1, 1, 65, bias=True)
    yield Sample("one channel, past 64 positions", (alone(x), weight, bias), values_only=True)
    x, weight, _ = problems.call(1, 65, 8, width=2)
    yield Sample("past 64 channels", (alone(x), weight), silu, values_only=True)
    x, weight, _ = problems.call(2, 6, 9)
    now = torch.zeros_like(weight)
    now[:, -1] = 1.0
    yield Sample("a result equal to x", (x, leaf(now)), values_only=True)
    alike_in_few_bits = torch.tensor([[0] * 3 + [256] * 4 + [65_792] * 2 + [66_048] * 4], dtype=torch.int32)
    options = {**silu, "seq_idx": alike_in_few_bits.to(problems.device)}
    yield Sample("numbers 256 and 65536 apart", problems.call(1, 5, 13), options, values_only=True)


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    packed = problems.packed([1, 700, 255, 1, 1, 1091])
    yield Sample(
        "past 2048 positions", problems.call(1, 66, 2049, bias=True), {"seq_idx": packed, "activation": "silu"}
    )
    yield Sample("past 1024 channels", problems.call(2, 1100, 33), {"activation": "silu"})
    packed = problems.packed([33, 32])
    aligned = problems.call(1, 1280, 65, bias=True)
    yield Sample("1280 channels", aligned, {"seq_idx": packed, "activation": "silu"})

    def make(
        batch: int, channels: int, length: int, width: int, bias: bool, activation: str | None, packed: str, layout: str
    ) -> Sample:
        x, *others = problems.call(batch, channels, length, width=width, bias=bias)
        if layout == "positions last":
            x = leaf(x.detach().contiguous())
        elif layout == "a part of the channels":
            weight = others[0]
            assert weight is not None
            x, others[0] = (
                leaf(each.detach().repeat_interleave(2, at).narrow(at, 0, channels))
                for each, at in ((x, 1), (weight, 0))
            )
        rows = [[3, 1, length - 4], [length], [1, length - 1]][:batch]
        numbers = {"seq_idx": problems.packed(*rows).to(getattr(torch, packed)) * 7} if packed != "not" else {}
        return Sample("", (x, *others), {"activation": activation, **numbers})

    shapes = {"batch": (1, 3), "channels": (24, 80), "length": (16, 72, 129), "width": (2, 3, 4), "bias": (False, True)}
    layouts = ("channels last", "positions last", "a part of the channels")
    kinds = {"activation": (None, "silu", "swish"), "packed": ("not", "int32", "int64"), "layout": layouts}
    yield from together(make, **shapes, **kinds)
    options = {"activation": "silu", "seq_idx": problems.packed([1000, 101], [500, 550, 51])}
    yield Sample("two rows past 1024 positions", problems.call(2, 6, 1101, bias=True), options, values_only=True)
    x, weight, _ = problems.call(2, 2200, 13)
    part = leaf(x.detach()[:, 1100:]), leaf(weight.detach()[1100:])
    yield Sample("a part of the channels, past 1024", part, {"activation": "silu"}, values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    problems = _Problems(device, dtype)
    packed = problems.packed([4099], [1, 2047, 2048, 3])
    yield Sample("a model's mixer", problems.call(2, 8192, 4099), {"activation": "silu", "seq_idx": packed})


def _alike(sample: Sample, features: Collection[str]) -> Iterator[Alike]:
    """Cut off, and packed behind another sequence."""
    x, *others = sample.args
    length, options = x.shape[2], dict(sample.kwargs)
    numbers = options.pop("seq_idx", None)
    cut = max(length // 2, 1)
    if length > 1:
        shorter = options if numbers is None else {**options, "seq_idx": numbers[:, :cut]}
        half = replace(sample, args=(x.detach()[..., :cut], *others), kwargs=shorter)
        yield Alike("where later positions are cut off", (sample, half), (lambda y: y[..., :cut], lambda y: y))
    if numbers is None and x.numel():
        before = x.detach()[..., :cut].flip(-1)
        packed = torch.cat((torch.zeros(len(x), cut), torch.ones(len(x), length)), dim=1).int().to(x.device)
        joined = torch.cat((before, x.detach()), dim=-1)
        both = replace(sample, args=(joined, *others), kwargs={**options, "seq_idx": packed})
        yield Alike("where it is packed behind another", (sample, both), (lambda y: y, lambda y: y[..., cut:]))


VALUES = tolerances(float32=(4e-6, 1e-6), bfloat16=(2e-2, 6e-3), float16=(2.5e-3, 8e-4))
# The gradients of weight and bias are sums over all positions.
GRADIENTS = tolerances(float32=(2e-5, 4e-6), bfloat16=(4e-2, 1e-2), float16=(5e-3, 1.3e-3))

CONTRACTS = {
    "standard": Contract(
        op_name="causal_conv1d",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        rows=("x", "seq_idx"),
        alike=_alike,
    )
}
