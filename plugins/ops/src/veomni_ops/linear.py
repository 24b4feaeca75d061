"""linear: a matrix product with a weight, and a bias. Nobody needs another kernel for it but for its bits.

``(x[..., A], weight[B, A], bias[B] or None) -> [..., B]`` in x's dtype. A site's ``sizes``: ``inputs`` (A) and
``outputs`` (B).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import LAYOUTS, ROWS, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, leaf, strided_oddly, tolerances


def standard(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, summed in float32.

    Args:
        x: ``[..., A]``, of any floating dtype.
        weight: ``[B, A]``, in x's dtype.
        bias: ``[B]``, likewise.

    Returns:
        ``[..., B]`` in x's dtype. Gradients reach all three.

    Example:
        >>> standard(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, 3.0]]), torch.tensor([0.5, 0.0]))
        tensor([3.5000, 6.0000])
    """
    return F.linear(x, weight, bias)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)

    def problem(*shape: int, outputs: int, bias: bool = False) -> tuple[Tensor, ...]:
        weight = leaf(draw.normal(outputs, shape[-1], scale=shape[-1] ** -0.5))
        return (leaf(draw.normal(*shape)), weight, *([leaf(draw.normal(outputs))] if bias else []))

    yield Sample("odd sizes", problem(37, 41, outputs=23))
    yield Sample("a bias", problem(3, 13, 48, outputs=65, bias=True))
    x, weight, bias = problem(2, 9, 64, outputs=40, bias=True)
    yield Sample("every other token", (leaf(x.detach()[:, ::2]), weight, bias))
    yield Sample("a transposed weight", (x, leaf(draw.normal(64, 24, scale=0.1).t())))
    yield Sample("one row", problem(1, 96, outputs=33), values_only=True)
    yield Sample("one output", problem(19, 32, outputs=1, bias=True), values_only=True)
    yield Sample("a width of one", problem(7, 1, outputs=16), values_only=True)
    yield Sample("no rows", problem(0, 24, outputs=16, bias=True), values_only=True)


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    for rows, width, outputs in ((131, 200, 150), (65, 1056, 129), (513, 40, 67)):
        weight = leaf(draw.normal(outputs, width, scale=width**-0.5))
        yield Sample(f"{rows} rows", (leaf(draw.normal(rows, width)), weight, leaf(draw.normal(outputs))))

    def make(rows: tuple[int, ...], inputs: int, outputs: int, bias: bool, layout: str) -> Sample:
        weight = leaf(draw.normal(outputs, inputs, scale=inputs**-0.5))
        x = laid_out(draw.normal(*rows, inputs), layout) if rows else leaf(draw.normal(inputs))
        return Sample("", (x, weight, *([leaf(draw.normal(outputs))] if bias else [])))

    widths = {"inputs": (80, 192), "outputs": (64, 80)}
    yield from together(make, rows=((), *ROWS), **widths, bias=(False, True), layout=LAYOUTS)
    x, weight, bias = (draw.normal(*shape) for shape in ((1, 5, 96), (24, 96), (24,)))
    call = leaf(strided_oddly(x)), leaf(weight), leaf(bias)
    yield Sample("a batch of one, strided oddly", call, values_only=True)
    if dtype != torch.float32:  # whose sums over so many rows round past the tolerances, as 16 bits' own sums do
        yield Sample("past 65535 rows", (leaf(draw.normal(65_601, 8)), leaf(draw.normal(16, 8, scale=0.4))))
    weight, bias = leaf(draw.normal(33, 1056, scale=1056**-0.5)), leaf(draw.normal(33))
    yield Sample("1056 inputs of a few rows", (leaf(draw.normal(9, 1056)), weight, bias))
    weight, bias = leaf(draw.normal(24, 40, scale=40**-0.5)), leaf(draw.normal(24))
    yield Sample("5 dimensions, a bias", (leaf(draw.normal(2, 3, 1, 2, 40)), weight, bias), values_only=True)


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    weight = leaf(draw.normal(3072, 1024, scale=1024**-0.5))
    yield Sample("a model's projection", (leaf(draw.normal(2, 1027, 1024)), weight))


VALUES = tolerances(float32=(8e-6, 2e-6), bfloat16=(1.6e-2, 5e-3), float16=(2e-3, 6e-4))
GRADIENTS = tolerances(float32=(2e-5, 4e-6), bfloat16=(1.6e-2, 5e-3), float16=(2e-3, 6e-4))

CONTRACTS = {
    "standard": Contract(
        op_name="linear",
        variant="standard",
        reference=standard,
        samples=_samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        rows=("x",),
    )
}
