"""swiglu_mlp: ``(gate[..., I], up[..., I]) -> act(gate) * up``, the activation between a gated MLP's linears.

``standard`` activates with SiLU (Shazeer 2020, SwiGLU), ``gelu`` with the exact GELU, ``gelu_tanh`` with GELU's tanh
approximation (Gemma). A site's ``sizes``: ``hidden`` and ``intermediate`` (I).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_ops.combinations import LAYOUTS, ROWS, laid_out, together
from veomni_ops.contract import Contract, Draw, Sample, leaf, strided_oddly, tolerances


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; a kernel may keep the activation in float32 where eager code rounds it.

    Args:
        gate: ``[..., I]``, of any floating dtype.
        up: ``[..., I]``, of gate's dtype.

    Returns:
        ``[..., I]`` in their dtype.

    Example:
        >>> standard(gate=torch.tensor([-1.0, 0.0, 1.0]), up=torch.tensor([10.0, 10.0, 10.0]))
        tensor([-2.6894,  0.0000,  7.3106])
    """
    return F.silu(gate) * up


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the exact error function; a kernel may keep the activation in float32.

    Takes and returns what :func:`standard` does.

    Example:
        >>> gelu(gate=torch.tensor([-1.0, 0.0, 1.0]), up=torch.tensor([10.0, 10.0, 10.0]))
        tensor([-1.5866,  0.0000,  8.4134])
    """
    return F.gelu(gate) * up


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate, approximate="tanh") * up``; a kernel may keep the activation in float32.

    Takes and returns what :func:`standard` does.

    Example:
        >>> gelu_tanh(gate=torch.tensor([-1.0, 0.0, 1.0]), up=torch.tensor([10.0, 10.0, 10.0]))
        tensor([-1.5881,  0.0000,  8.4119])
    """
    return F.gelu(gate, approximate="tanh") * up


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Odd widths, the halves of a packed projection, large values, zeros, and no rows.

    Args:
        device: where the samples' tensors are.
        dtype: their dtype.

    Example:
        >>> for sample in samples(torch.device("cpu"), torch.bfloat16):
        ...     print(sample.name, [tuple(x.shape) for x in sample.args])
        odd width [(3, 5, 97), (3, 5, 97)]
        wide [(5, 2048), (5, 2048)]
        halves of one tensor [(4, 96), (4, 96)]
        large values [(4, 64), (4, 64)]
        no rows [(0, 64), (0, 64)]
        zeros [(8, 512), (8, 512)]
        one dimension [(97,), (97,)]
        4 dimensions [(2, 3, 4, 64), (2, 3, 4, 64)]
        5 dimensions [(2, 1, 3, 2, 40), (2, 1, 3, 2, 40)]
        a batch of one, strided oddly [(1, 5, 96), (1, 5, 96)]
        65 rows [(65, 64), (65, 64)]
        a width of one [(9, 1), (9, 1)]
        a result equal to gate [(4, 32), (4, 32)]
    """
    draw = Draw(device, dtype)
    yield Sample("odd width", (leaf(draw.normal(3, 5, 97)), leaf(draw.normal(3, 5, 97))))
    yield Sample("wide", (leaf(draw.normal(5, 2048, scale=2.0)), leaf(draw.normal(5, 2048))))
    packed = draw.normal(4, 2 * 96)
    yield Sample("halves of one tensor", tuple(leaf(half) for half in packed.chunk(2, dim=-1)))
    yield Sample("large values", (leaf(draw.normal(4, 64, scale=30.0)), leaf(draw.normal(4, 64, scale=30.0))))
    yield Sample("no rows", (leaf(draw.normal(0, 64)), leaf(draw.normal(0, 64))))
    gate, up = draw.normal(8, 512), draw.normal(8, 512)
    gate[1], up[2], gate[3, ::2], up[3, ::3] = 0.0, 0.0, 0.0, 0.0
    yield Sample("zeros", (leaf(gate), leaf(up)), values_only=True)
    yield Sample("one dimension", (leaf(draw.normal(97)), leaf(draw.normal(97))), values_only=True)
    for name, shape in (
        ("4 dimensions", (2, 3, 4, 64)),
        ("5 dimensions", (2, 1, 3, 2, 40)),
        ("a batch of one, strided oddly", (1, 5, 96)),
        ("65 rows", (65, 64)),
        ("a width of one", (9, 1)),
    ):
        gate, up = (leaf(strided_oddly(draw.normal(*shape))) for _ in range(2))
        yield Sample(name, (gate, up), values_only=True)
    gate = draw.normal(4, 32, scale=0.5, shift=40.0)  # where every activation here is the identity
    yield Sample("a result equal to gate", (leaf(gate), leaf(torch.ones_like(gate))), values_only=True)


def _beyond_a_tile(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    yield Sample("past 2048 columns", (leaf(draw.normal(3, 5003)), leaf(draw.normal(3, 5003))))
    yield Sample("16384 columns", (leaf(draw.normal(2, 16_384)), leaf(draw.normal(2, 16_384))))
    yield Sample("past 65535 rows", (leaf(draw.normal(65_601, 8, scale=0.5)), leaf(draw.normal(65_601, 8))))
    yield Sample("5120 columns", (leaf(draw.normal(3, 5120, scale=0.5)), leaf(draw.normal(3, 5120))))

    def make(rows: tuple[int, ...], width: int, layout: str, up: str) -> Sample:
        gate = draw.normal(
            *rows, width, scale=0.5
        )  # half as large: far below 0 a GELU is a difference that float32 rounds
        return Sample("", (laid_out(gate, layout), laid_out(draw.normal(*rows, width), up)))

    yield from together(make, rows=ROWS, width=(80, 112, 272), layout=LAYOUTS, up=LAYOUTS)
    for width in (12_296, 53_248, 1025, 4097):
        yield Sample(f"{width} columns", (leaf(draw.normal(2, width, scale=0.5)), leaf(draw.normal(2, width))))


def _large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    draw = Draw(device, dtype)
    gate, up = draw.normal(4099, 2 * 14_336).chunk(2, dim=-1)
    yield Sample("halves of a model's projection", (leaf(gate), leaf(up)))
    yield Sample("past 65535 wide rows", (leaf(draw.normal(65_539, 768)), leaf(draw.normal(65_539, 768))))


VALUES = tolerances(float32=(2e-6, 5e-7), bfloat16=(1.6e-2, 4e-3), float16=(2e-3, 5e-4))
# The derivative of the tanh approximation suffers cancellation for large gates: a factor of ten in float32.
GRADIENTS = tolerances(float32=(1.5e-5, 1e-6), bfloat16=(2.4e-2, 6e-3), float16=(3e-3, 8e-4))

CONTRACTS = {
    reference.__name__: Contract(
        op_name="swiglu_mlp",
        variant=reference.__name__,
        reference=reference,
        samples=samples,
        values=VALUES,
        gradients=GRADIENTS,
        beyond_a_tile=_beyond_a_tile,
        large=_large,
        rows=("gate", "up"),
    )
    for reference in (standard, gelu_tanh, gelu)
}
