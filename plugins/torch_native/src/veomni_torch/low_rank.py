"""Low-rank adapters of grouped linears: products of width ``r`` beside those of the weights.

An adapter of ``weight[E, B, A]`` is ``(a[E, r, A], b[E, B, r], scaling)``, and stands for ``weight + scaling * b @ a``.
That sum is never computed. Shapes otherwise: N rows sorted by expert, of which ``ends[E]`` are the groups.
"""

from __future__ import annotations

from torch import Tensor

from veomni_torch.grouped_products import grouped_linear, grouped_outer, grouped_product

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
    return product.add_(grouped_product(inner, b.transpose(1, 2), ends), alpha=scaling)


def low_rank_linear(rows: Tensor, adapter: Adapter, ends: Tensor) -> Tensor:
    """Differentiable: the adapter's part of ``rows[N, A] @ weight.mT``, ``[N, B]``."""
    a, b, scaling = adapter
    return grouped_linear(grouped_linear(rows, a, ends), b, ends) * scaling


def add_gradient_of_rows(drows: Tensor, dproduct: Tensor, adapter: Adapter | None, ends: Tensor) -> Tensor:
    """Adds what reaches the rows through the adapter to ``drows[N, A]``, in place.

    ``dproduct[N, B]`` is the gradient of the sum of both products.
    """
    if adapter is None:
        return drows
    a, b, scaling = adapter
    return drows.add_(grouped_product(grouped_product(dproduct, b, ends), a, ends), alpha=scaling)


def gradients_of_adapter(dproduct: Tensor, rows: Tensor, adapter: Adapter, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``a`` and ``b`` from ``dproduct[N, B]``, the gradient of the sum, and ``rows[N, A]``.

    The inner products ``[N, r]`` are computed again, so that forward saves nothing for them.
    """
    a, b, scaling = adapter
    dinner = grouped_product(dproduct, b, ends).mul_(scaling)  # [N, r]
    inner = grouped_product(rows, a.transpose(1, 2), ends).mul_(scaling)  # [N, r]
    return grouped_outer(dinner, rows, ends), grouped_outer(dproduct, inner, ends)
