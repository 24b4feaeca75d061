"""rms_norm: ``(x[..., H], weight[H] or None, eps) -> [..., H]``, root-mean-square normalisation (Zhang, Sennrich 2019).

The variants differ in what the weight means and in where the result is rounded to the dtype of ``x``.
A site's ``sizes``: ``width`` (H), if it has a weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veomni_ops.combinations import LAYOUTS, ROWS, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, SampleMaker, compute_dtype, leaf, strided_oddly, tolerances


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.to(compute_dtype(x))
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def standard(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))``, with ``x / rms(x)`` rounded to x's dtype before the weight (Llama).

    Args:
        x: the input ``[..., H]``, of any floating dtype.
        weight: ``[H]``.
        eps: added to the mean square of a row.

    Returns:
        ``[..., H]`` in the dtype to which ``x`` and ``weight`` promote; x's own if they agree.

    Example:
        >>> x = torch.tensor([[3.0, 4.0], [30.0, 40.0]])
        >>> standard(x, weight=torch.tensor([1.0, 2.0]), eps=0.0)
        tensor([[0.8485, 2.2627],
                [0.8485, 2.2627]])
        >>> standard(x.bfloat16(), weight=torch.tensor([1.0, 2.0]), eps=0.0).dtype  # a float32 weight decides
        torch.float32
    """
    return weight * _normalised(x, eps).to(x.dtype)


def cast_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` in float32, rounded once at the end (OLMo 2, gpt-oss).

    Takes what :func:`standard` takes, and returns ``[..., H]`` in x's dtype, whatever the weight's.

    Example:
        >>> x, weight = torch.tensor([1.0, 2.0, 4.0]).bfloat16(), torch.tensor([0.7, 0.7, 0.7]).bfloat16()
        >>> cast_after(x, weight, eps=0.0)  # one rounding
        tensor([0.2637, 0.5273, 1.0547], dtype=torch.bfloat16)
        >>> standard(x, weight, eps=0.0)  # two
        tensor([0.2656, 0.5312, 1.0625], dtype=torch.bfloat16)
    """
    normalised = _normalised(x, eps)
    return (weight.to(normalised.dtype) * normalised).to(x.dtype)


def offset(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(1 + weight) * (x / rms(x))`` in float32, rounded once at the end (Gemma, Qwen3.5).

    Takes what :func:`standard` takes, and returns ``[..., H]`` in x's dtype. A weight of zero changes nothing.

    Example:
        >>> offset(torch.tensor([[3.0, 4.0]]), weight=torch.tensor([0.0, 1.0]), eps=0.0)
        tensor([[0.8485, 2.2627]])
    """
    normalised = _normalised(x, eps)
    return (normalised * (1.0 + weight.to(normalised.dtype))).to(x.dtype)


def unweighted(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x / rms(x)`` in float32, rounded at the end; ``weight`` is ``None``.

    Args:
        x: the input ``[..., H]``, of any floating dtype.
        weight: ``None``, so that every variant has one call signature.
        eps: added to the mean square of a row.

    Returns:
        ``[..., H]`` in x's dtype.

    Example:
        >>> unweighted(torch.tensor([[3.0, 4.0]]), None, eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    return _normalised(x, eps).to(x.dtype)


def unweighted_rounded_scale(x: Tensor, weight: None, eps: float) -> Tensor:
    """``x * (1 / rms(x))`` with ``1 / rms(x)`` rounded to x's dtype first (DeepSeek-V4); ``weight`` is ``None``.

    Takes and returns what :func:`unweighted` does.

    Example:
        >>> x = torch.tensor([1.0, 3.0, 3.0]).bfloat16()
        >>> unweighted_rounded_scale(x, None, eps=0.0)
        tensor([0.3965, 1.1875, 1.1875], dtype=torch.bfloat16)
        >>> unweighted(x, None, eps=0.0)
        tensor([0.3965, 1.1953, 1.1953], dtype=torch.bfloat16)
    """
    wide = x.to(compute_dtype(x))
    return x * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps).to(x.dtype)


def _samples(weighted: bool, weight_shift: float) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype)

        def weight(width: int) -> Tensor | None:
            return leaf(draw.normal(width, scale=0.3, shift=weight_shift)) if weighted else None

        yield Sample("odd width", (leaf(draw.normal(3, 5, 97)), weight(97), 1e-6))
        yield Sample("one row", (leaf(draw.normal(1, 256)), weight(256), 1e-5))
        yield Sample("wide", (leaf(draw.normal(7, 2048, scale=3.0)), weight(2048), 1e-6))
        yield Sample("heads, transposed", (leaf(draw.normal(2, 4, 6, 64).transpose(1, 2)), weight(64), 1e-6))
        yield Sample("every other row", (leaf(draw.normal(12, 128)[::2]), weight(128), 1e-3))
        yield Sample("large values", (leaf(draw.normal(4, 160, scale=100.0)), weight(160), 1e-6))
        yield Sample("eps dominates", (leaf(draw.normal(4, 128, scale=1e-3)), weight(128), 1e-2))
        yield Sample("no rows", (leaf(draw.normal(0, 64)), weight(64), 1e-6))
        yield Sample("another eps at a shape seen before", (leaf(draw.normal(1, 256)), weight(256), 0.5))
        yield Sample("one dimension", (leaf(draw.normal(48)), weight(48), 1e-6), values_only=True)
        zeros = draw.normal(4, 96)
        zeros[1], zeros[2, ::3] = 0.0, 0.0  # as a padding token gives, and a ReLU
        yield Sample("zeros", (leaf(zeros), weight(96), 1e-3), values_only=True)
        yield Sample("without eps", (leaf(draw.normal(3, 40, scale=1e-3)), weight(40), 0.0), values_only=True)
        for shape in ((2, 3, 4, 64), (2, 1, 3, 2, 40)):
            x = leaf(draw.normal(*shape))
            yield Sample(f"{len(shape)} dimensions", (x, weight(shape[-1]), 1e-5), values_only=True)
        one = leaf(strided_oddly(draw.normal(1, 5, 96)))
        yield Sample("a batch of one, strided oddly", (one, weight(96), 1e-5), values_only=True)
        yield Sample("65 rows", (leaf(draw.normal(65, 64, scale=0.05)), weight(64), 1e-3), values_only=True)
        yield Sample("a width of one", (leaf(draw.normal(9, 1)), weight(1), 0.5), values_only=True)
        small = leaf(draw.normal(5, 48, scale=1e-3))
        yield Sample("small values, and an eps below theirs", (small, weight(48), 1e-8), values_only=True)
        signs = leaf(draw.normal(6, 32).sign())  # their root mean square is 1
        same = leaf(torch.full_like(signs[0], weight_shift)) if weighted else None
        yield Sample("a result equal to x", (signs, same, 0.0), values_only=True)

    return samples


def _beyond_a_tile(weighted: bool, weight_shift: float) -> SampleMaker:
    shapes = {"past 2048 columns": (5, 5003), "16384 columns": (2, 16_384), "past 65535 rows": (65_601, 16)}
    shapes |= {"5120 columns": (3, 5120), "12296 columns": (2, 12_296)}  # aligned, and no whole number of tiles
    shapes |= {"37 rows of 2048 columns": (37, 2048)}

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield from _sized(shapes, weighted, weight_shift)(device, dtype)
        draw = Draw(device, dtype, seed=8)

        def make(rows: tuple[int, ...], width: int, eps: float, layout: str) -> Sample:
            weight = leaf(draw.normal(width, scale=0.3, shift=weight_shift)) if weighted else None
            return Sample("", (laid_out(draw.normal(*rows, width), layout), weight, eps))

        yield from together(make, rows=ROWS, width=(80, 112, 272), eps=(1e-6, 1e-5, 1e-3), layout=LAYOUTS)

    return samples


def _large(weighted: bool, weight_shift: float) -> SampleMaker:
    return _sized({"a model's rows": (16_387, 4096), "the widest rows": (37, 32_768)}, weighted, weight_shift)


def _sized(shapes: dict[str, tuple[int, int]], weighted: bool, weight_shift: float) -> SampleMaker:
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype)
        for name, shape in shapes.items():
            weight = leaf(draw.normal(shape[1], scale=0.3, shift=weight_shift)) if weighted else None
            yield Sample(name, (leaf(draw.normal(*shape)), weight, 1e-6))

    return samples


VALUES = tolerances(float32=(2e-6, 1e-6), bfloat16=(1.2e-2, 4e-3), float16=(1.5e-3, 5e-4))
GRADIENTS = tolerances(float32=(1e-5, 2e-6), bfloat16=(2.5e-2, 6e-3), float16=(3e-3, 8e-4))
# Applying the weight before instead of after the rounding changes about a quarter of all bf16 elements. Another order
# of summation changes well under 1 %.
ROUNDING = {"bfloat16": 0.03, "float16": 0.03}


def _contract(variant: str, reference: object, weighted: bool = True, weight_shift: float = 1.0) -> Contract:
    return Contract(
        op_name="rms_norm",
        variant=variant,
        reference=reference,  # type: ignore[arg-type]
        samples=_samples(weighted, weight_shift),
        values=VALUES,
        gradients=GRADIENTS,
        rounding=ROUNDING,
        beyond_a_tile=_beyond_a_tile(weighted, weight_shift),
        large=_large(weighted, weight_shift),
        rows=("x",),
    )


CONTRACTS = {
    "standard": _contract("standard", standard),
    "cast_after": _contract("cast_after", cast_after),
    "offset": _contract("offset", offset, weight_shift=0.0),
    "unweighted": _contract("unweighted", unweighted, weighted=False),
    "unweighted_rounded_scale": _contract("unweighted_rounded_scale", unweighted_rounded_scale, weighted=False),
}
