"""Low-rank adapters of grouped linears: products of width ``r`` beside those of the weights.

An adapter of ``weight[E, B, A]`` is ``(a[E, r, A], b[E, B, r], scaling)``, and stands for ``weight + scaling * b @ a``.
That sum is never computed. Shapes otherwise: N rows sorted by expert, of which ``ends[E]`` are the groups.
"""

from __future__ import annotations

from torch import Tensor

from veomni_torch.grouped_products import add_grouped_product, grouped_linear, grouped_outer, grouped_product

Adapter = tuple[Tensor, Tensor, float]


def adapter_of(a: Tensor | None, b: Tensor | None, scaling: float) -> Adapter | None:
    """The adapter of these parts, which custom operators take one by one; ``None`` where there is none."""
    return None if a is None or b is None else (a, b, scaling)


def add_low_rank(product: Tensor, rows: Tensor, adapter: Adapter | None, ends: Tensor) -> Tensor:
    """Adds the adapter's part of ``rows[N, A] @ weight.mT`` to ``product[N, B]``, in place."""
    if adapter is None:
        return product
    a, b, scaling = adapter
    inner = grouped_product(rows, a.transpose(1, 2), ends)  # [N, r]
    return add_grouped_product(product, inner, b.transpose(1, 2), ends, scaling)


def low_rank_linear(rows: Tensor, adapter: Adapter, ends: Tensor) -> Tensor:
    """Differentiable: the adapter's part of ``rows[N, A] @ weight.mT``, ``[N, B]``."""
    a, b, scaling = adapter
    return grouped_linear(grouped_linear(rows, a, ends), b, ends) * scaling


def inner_gradient(dproduct: Tensor, adapter: Adapter | None, ends: Tensor) -> Tensor | None:
    """The gradient ``[N, r]`` of ``rows @ a.mT``, from that of the product ``[N, B]``."""
    return None if adapter is None else grouped_product(dproduct, adapter[1], ends).mul_(adapter[2])


def add_gradient_of_rows(drows: Tensor, dinner: Tensor | None, adapter: Adapter | None, ends: Tensor) -> Tensor:
    """Adds what reaches the rows through the adapter to ``drows[N, A]``, in place; ``dinner`` as above."""
    return drows if adapter is None or dinner is None else add_grouped_product(drows, dinner, adapter[0], ends)


def gradients_of_adapter(
    dproduct: Tensor, dinner: Tensor, rows: Tensor, weights: Tensor | None, adapter: Adapter, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``a`` and ``b``, where the sum of both products is multiplied by ``weights[N, 1]`` afterwards.

    ``dproduct[N, B]``, ``dinner[N, r]`` and ``rows[N, A]`` are those before the weights. The inner products are
    computed again, so that forward saves nothing for them.
    """
    a, _, scaling = adapter
    inner = grouped_product(rows, a.transpose(1, 2), ends).mul_(scaling)  # [N, r]
    if weights is not None:
        dinner, inner = dinner * weights, inner.mul_(weights)
    return grouped_outer(dinner, rows, ends), grouped_outer(dproduct, inner, ends)
