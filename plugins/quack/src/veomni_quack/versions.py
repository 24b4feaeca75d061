"""The QuACK functions whose names or arguments differ between 0.4 and 0.6, the versions that the plugin calls.

What both versions have, with the same arguments and the same meaning, is imported where it is called.
"""

from __future__ import annotations

from typing import Any

import quack
from quack.cross_entropy import cross_entropy_fwd_out
from torch import Tensor

OLD = quack.__version__.startswith("0.4.")

if OLD:
    from quack.cache_utils import CACHE_ENABLED, get_cache_path
    from quack.gemm_interface import gemm_dgated_tuned, gemm_gated_tuned
else:
    from quack.cache import CACHE_ENABLED, get_cache_path
    from quack.gemm_interface import gemm_dgated, gemm_gated

__all__ = ["CACHE_ENABLED", "OLD", "gated_product", "gated_product_backward", "get_cache_path", "losses_of_rows"]


def losses_of_rows(logits: Tensor, labels: Tensor, out: Tensor, ignore_index: int) -> None:
    """Write the cross entropy of each row, and overwrite the logits with its gradient.

    The gradient is written even if nobody wants it. Without one QuACK sums exponentials in another way, which is NaN
    where a block of threads has no columns: 16 blocks of 10240 columns leave the last one none of Qwen's 151936.
    """
    # 0.6 can weigh the classes. It has no default for the weights.
    weights: dict[str, Any] = {} if OLD else {"weight": None}
    cross_entropy_fwd_out(logits, labels, None, loss=out, lse=None, dx=logits, ignore_index=ignore_index, **weights)


def gated_product(rows: Tensor, matrices: Tensor, pre: Tensor, activated: Tensor, **options: Any) -> None:
    """Write the product and its activation.

    Args:
        options: ``config`` among them, so that QuACK chooses none itself.
    """
    if OLD:
        gemm_gated_tuned.fn(rows, matrices, pre, activated, **options)
    else:
        # 0.6.2 took gemm_gated_tuned away. Its public function takes a configuration instead.
        gemm_gated(rows, matrices, preact_out=pre, postact_out=activated, tuned=False, **options)


def gated_product_backward(
    rows: Tensor, matrices: Tensor, pre: Tensor, dpre: Tensor, activated: Tensor, **options: Any
) -> Tensor:
    """Write the gradient of the pre-activations, and the activation; return the sums along the rows.

    Args:
        options: as of :func:`gated_product`; ``colvec_reduce=True`` among them.
    """
    if OLD:
        sums: Tensor = gemm_dgated_tuned.fn(rows, matrices, pre, dpre, activated, **options)
    else:
        _, _, sums = gemm_dgated(rows, matrices, pre, dx_out=dpre, postact_out=activated, tuned=False, **options)
    return sums
