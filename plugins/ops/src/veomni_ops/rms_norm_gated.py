"""rms_norm_gated: root-mean-square normalisation with a gate, as in state-space and linear-attention mixers.

``(x[..., H], gate[..., H], weight[H], eps, group_size=None) -> [..., H]`` in x's dtype; statistics are in float32.
With ``group_size``, each group of so many elements of a row is normalised on its own.
A site's ``sizes``: ``width`` (H), if it has a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import CONTIGUOUS, LAYOUTS, ROWS, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, SampleMaker, compute_dtype, leaf, strided_oddly, tolerances


def _normalised(x: Tensor, eps: float, group_size: int | None) -> Tensor:
    size = group_size or x.shape[-1]
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)  # [..., H / group_size, group_size]
    return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)


def standard(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * silu(gate)``: rounded to x's dtype before the weight and at the end (Qwen3-Next).

    Args:
        x: the input ``[..., H]``, of any floating dtype.
        gate: ``[..., H]``.
        weight: ``[H]``.
        eps: added to the mean square of a group.
        group_size: the number of neighbouring elements that are normalised together; it divides H. ``None`` for H.

    Returns:
        ``[..., H]`` in x's dtype.

    Example:
        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.ones(2)
        >>> standard(x, gate=torch.tensor([[0.0, 1.0]]), weight=weight, eps=0.0)  # a gate of 0 is closed
        tensor([[0.0000, 0.8271]])
        >>> standard(x, torch.ones(1, 2), weight, eps=0.0, group_size=1)  # each element is its own rms
        tensor([[0.7311, 0.7311]])
    """
    wide = compute_dtype(x)
    return ((weight * _normalised(x.to(wide), eps, group_size).to(x.dtype)) * F.silu(gate.to(wide))).to(x.dtype)


def sigmoid(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (x / rms(x)) * sigmoid(gate)`` in float32, rounded once at the end (Kimi Linear).

    Takes and returns what :func:`standard` does.

    Example:
        >>> sigmoid(torch.tensor([[3.0, 4.0]]), gate=torch.zeros(1, 2), weight=torch.ones(2), eps=0.0)  # half open
        tensor([[0.4243, 0.5657]])
    """
    wide = compute_dtype(x)
    return (weight.to(wide) * _normalised(x.to(wide), eps, group_size) * torch.sigmoid(gate.to(wide))).to(x.dtype)


def gate_first(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int | None = None) -> Tensor:
    """``weight * (y / rms(y))`` of ``y = x * silu(gate)``, rounded before the weight (Mamba 2).

    Takes and returns what :func:`standard` does.

    Example:
        >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.ones(2)
        >>> gate_first(x, gate=torch.ones(1, 2), weight=weight, eps=0.0)  # the norm undoes a gate that all share
        tensor([[0.8485, 1.1314]])
        >>> standard(x, torch.ones(1, 2), weight, eps=0.0)
        tensor([[0.6203, 0.8271]])
    """
    wide = compute_dtype(x)
    gated = x.to(wide) * F.silu(gate.to(wide))
    return weight * _normalised(gated, eps, group_size).to(x.dtype)


def _samples(group_size: int | None) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype)

        def problem(*shape: int, scale: float = 1.0, eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor, float]:
            weight = leaf(draw.normal(shape[-1], scale=0.3, shift=1.0))
            return leaf(draw.normal(*shape, scale=scale)), leaf(draw.normal(*shape)), weight, eps

        options = {"group_size": group_size}
        yield Sample("odd rows", problem(3, 5, 96, eps=1e-5), options)
        yield Sample("large values", problem(4, 128, scale=50.0), options)
        yield Sample("no rows", problem(0, 64), options)
        x, gate, weight, eps = problem(12, 64)
        yield Sample("every other row", (leaf(x.detach()[::2]), leaf(gate.detach()[::2]), weight, eps), options)
        name, other = ("one group", None) if group_size else ("groups of 32", 32)
        yield Sample(name, problem(5, 96), {"group_size": other}, values_only=True)
        yield from _edges(device, dtype)

    return samples


def _edges(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Each with another eps and size of groups."""
    draw = Draw(device, dtype, seed=3)
    for name, shape, scale, eps, size in (
        ("groups of 48", (3, 96), 1.0, 1e-3, 48),
        ("a group as wide as the row", (5, 64), 0.05, 1e-3, 64),
        ("groups of 16 in 65 rows", (65, 64), 1.0, 1e-5, 16),
        ("no groups, and eps dominates", (4, 128), 1e-3, 1e-2, None),
        ("groups of one", (9, 8), 1.0, 0.5, 1),
        ("a width of one", (9, 1), 1.0, 0.5, None),
        ("small values, and an eps below theirs", (5, 48), 1e-3, 1e-8, 16),
        ("4 dimensions", (2, 3, 4, 64), 1.0, 1e-5, 32),
        ("5 dimensions", (2, 1, 3, 2, 32), 1.0, 1e-6, None),
        ("a batch of one, strided oddly", (1, 5, 96), 1.0, 1e-5, 32),
    ):
        x, gate = (leaf(strided_oddly(draw.normal(*shape, scale=by))) for by in (scale, 1.0))
        weight = leaf(draw.normal(shape[-1], scale=0.3, shift=1.0))
        yield Sample(name, (x, gate, weight, eps), {"group_size": size}, values_only=True)


def _beyond_a_tile(group_size: int | None) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield from _sized(_BEYOND_A_TILE, group_size)(device, dtype)
        draw = Draw(device, dtype, seed=8)

        def make(rows: tuple[int, ...], groups: int, size: int, eps: float, layout: str, gate: str) -> Sample:
            x, gates = (laid_out(draw.normal(*rows, groups * size), how) for how in (layout, gate))
            weight = leaf(draw.normal(groups * size, scale=0.3, shift=1.0))
            return Sample("", (x, gates, weight, eps), {"group_size": size if groups > 1 else None})

        shapes = {"rows": ROWS, "groups": (1, 3, 10), "size": (16, 24, 80)}
        yield from together(make, **shapes, eps=(1e-6, 1e-5, 1e-3), layout=LAYOUTS, gate=LAYOUTS)
        yield replace(make((2,), 2, 256, 1e-6, CONTIGUOUS, CONTIGUOUS), name="two groups of 256")
        yield replace(make((2,), 1, 12_296, 1e-6, CONTIGUOUS, CONTIGUOUS), name="12296 columns")
        yield replace(make((2,), 2, 2560, 1e-6, CONTIGUOUS, CONTIGUOUS), name="two groups of 2560")

    return samples


def _sized(shapes: dict[str, tuple[int, int]], group_size: int | None) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype)
        for name, shape in shapes.items():
            weight = leaf(draw.normal(shape[1], scale=0.3, shift=1.0))
            x, gate = leaf(draw.normal(*shape)), leaf(draw.normal(*shape))
            size = group_size or (48 if "groups" in name else None)
            yield Sample(name, (x, gate, weight, 1e-6), {"group_size": size})

    return samples


_BEYOND_A_TILE = {
    "past 2048 columns in groups": (5, 4128),
    "16384 columns": (2, 16_384),
    "5120 columns": (3, 5120),
    "past 65535 rows": (65_601, 32),
    "37 rows of 2048 columns": (37, 2048),
}
_LARGE = {"a model's rows": (16_387, 4096)}
_LARGE_GROUP = 512  # Mamba 2 divides its rows by eight
VALUES = tolerances(float32=(4e-6, 1e-6), bfloat16=(2e-2, 6e-3), float16=(2.5e-3, 8e-4))
GRADIENTS = tolerances(float32=(2e-5, 4e-6), bfloat16=(4e-2, 1e-2), float16=(5e-3, 1.3e-3))
ROUNDING = {"bfloat16": 0.03, "float16": 0.03}


def _contract(variant: str, reference: Callable[..., Tensor], group_size: int | None = None) -> Contract:
    samples = _samples(group_size)
    return Contract(
        op_name="rms_norm_gated",
        variant=variant,
        reference=reference,
        samples=samples,
        values=VALUES,
        gradients=GRADIENTS,
        rounding=ROUNDING,
        beyond_a_tile=_beyond_a_tile(group_size),
        large=_sized(_LARGE, group_size and _LARGE_GROUP),
        rows=("x", "gate"),
    )


CONTRACTS = {
    "standard": _contract("standard", standard),
    "sigmoid": _contract("sigmoid", sigmoid),
    "gate_first": _contract("gate_first", gate_first, group_size=32),
}
