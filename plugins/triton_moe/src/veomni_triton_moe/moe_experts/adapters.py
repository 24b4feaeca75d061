"""Low-rank adapters beside the experts' weights: a narrow product of its own, and further steps of the weight's.

An adapter of ``weight[E, B, A]`` is ``(a[E, r, A], b[E, B, r], scaling)``, and stands for ``weight + scaling * b @ a``;
that sum is never computed. Of its two products, :func:`inner_product` is a pass of its own over rows, and gives what is
called inner here: ``[N, R]``, the rank padded to whole blocks. The other product is a few more steps of the weight's,
while its sums are in registers: :func:`add_outer`. So nothing as wide as a row is written or read for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from veomni_triton_moe.moe_experts.factors import with_last_contiguous
from veomni_triton_moe.moe_experts.narrow_products import inner_product
from veomni_triton_moe.moe_experts.routing import Routing
from veomni_triton_moe.moe_experts.tiles import load_within


@dataclass(frozen=True)
class Adapter:
    """An adapter of one projection ``[E, B, A]``, expert by expert.

    Attributes:
        a: ``[E, r, A]``.
        b: ``[E, B, R]``, zeros in the columns from ``r`` on, so that each of its rows can be loaded in whole blocks.
        scaling: Factor of their product.
    """

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """``r``."""
        return self.a.shape[1]

    def inner(self, rows: Tensor, routing: Routing, tokens_of_rows: bool = False) -> Tensor:
        """``[N, R]``: the scaled product of ``rows[N, A]`` with ``a``; or of tokens, as in :func:`inner_product`."""
        return inner_product(rows, self.a.mT, self.rank, routing, self.scaling, tokens_of_rows)

    def outer(self, inner: Tensor) -> Outer:
        """What is added to the product of the weight."""
        return Outer(inner, self.b.mT)

    def inner_gradient(self, dproduct: Tensor, routing: Routing, tokens_of_rows: bool = False) -> Tensor:
        """``[N, R]``: the gradient of the rows' product with ``a``, from ``dproduct[N, B]`` or that of tokens."""
        return inner_product(dproduct, self.b, self.rank, routing, self.scaling, tokens_of_rows)

    def outer_gradient(self, dinner: Tensor, columns: slice = slice(None)) -> Outer:
        """What is added to ``columns`` of the rows' gradient."""
        return Outer(dinner, self.a[:, :, columns])


def adapter_of(a: Tensor | None, b: Tensor | None, scaling: float) -> Adapter | None:
    """The adapter of these parts, which operators take one by one; ``None`` where there is none."""
    return None if a is None or b is None else Adapter(a, b, scaling)


@dataclass(frozen=True)
class Outer:
    """What an adapter adds to a product of rows: ``inner[g] @ factors[e]`` for the group ``g`` of each expert ``e``.

    Attributes:
        inner: ``[N, R]``, contiguous, zeros in the columns from ``r`` on.
        factors: ``[E, r, B]`` or ``[E, R, B]``, of any strides.
    """

    inner: Tensor
    factors: Tensor

    def lines(self, rank_contiguous: bool) -> Tensor:
        """The factors as a TMA descriptor takes them: ``[E, B, r]`` or ``[E, r, B]``, the last dimension contiguous.

        They lie so, unless the weight whose product they extend lies the other way than usual. Then they are copied.
        """
        return with_last_contiguous(self.factors.mT) if rank_contiguous else with_last_contiguous(self.factors)


def outer_arguments(outer: Outer | None, inner: Any = None, factors: Any = None) -> tuple[tuple[Any, ...], int]:
    """The arguments of kernels that call :func:`add_outer`, and their ``RANK``, which is 0 without an adapter.

    Args:
        outer: The adapter's part, or ``None``.
        inner: A descriptor to pass in place of its own, if any.
        factors: Likewise.
    """
    if outer is None:
        return (None, 0, None, 0, 0, 0), 0
    inner, factors = (outer.inner if inner is None else inner), (outer.factors if factors is None else factors)
    return (inner, outer.inner.stride(0), factors, *outer.factors.stride()), outer.factors.shape[1]


# T tokens, K choices per token, N = T * K rows, sorted by expert; E experts; r the rank, R the rank in whole blocks of
# BLOCK_R. A is the width of the rows.


@triton.jit
def add_outer(
    product,  # [BLOCK_M, BLOCK_N], float32
    inner,  # [N, R], rows inner_stride apart
    inner_stride,
    factors,  # [E, RANK, B]
    rows,  # [BLOCK_M], each of them a row of inner
    expert,
    column,  # [BLOCK_N], each of them a column of factors
    expert_stride,  # of factors, as the next two
    rank_stride,
    column_stride,
    RANK: tl.constexpr,
):
    """``product + inner[rows] @ factors[expert][:, column]``."""
    # The least that tl.dot takes: beside the widest tiles, little shared memory is left.
    BLOCK_R: tl.constexpr = 16
    # Unrolled: a second loop would keep the caller's loops over tiles and k from being merged into one.
    for start in tl.static_range(0, RANK, BLOCK_R):
        rank = start + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        x = tl.load(inner + rows[:, None].to(tl.int64) * inner_stride + rank[None, :])  # [BLOCK_M, BLOCK_R]
        pointers = factors + expert.to(tl.int64) * expert_stride + column[None, :] * column_stride
        # [BLOCK_R, BLOCK_N]
        w = load_within(pointers + rank[:, None] * rank_stride, rank[:, None], RANK, RANK % BLOCK_R == 0)
        # ieee: float32 operands are multiplied exactly, not as TF32; it changes nothing for 16-bit ones.
        product = tl.dot(x, w, product, input_precision="ieee")
    return product
