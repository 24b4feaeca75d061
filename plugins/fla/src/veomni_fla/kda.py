"""kda by flash-linear-attention's ``chunk_kda``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from veomni_fla.delta_rules import Call, adapted, even
from veomni_fla.loading import of_fla
from veomni_fla.pinned import pinned
from veomni_ops.kda import check_call

_GRADIENTS = "chunk_kda_bwd_wy_dqkg_fused"


def fla() -> Call:
    """fla's function, with its Triton kernels throughout, and gates of any size.

    Raises:
        ImportError: fla can't be imported.
    """
    gradients = pinned(of_fla("ops.kda.chunk_bwd", _GRADIENTS))
    library = pinned(of_fla("ops.kda.chunk", "chunk_kda"), {_GRADIENTS: summed_in_float32(gradients)})
    return adapted("fla", library, check_call, even)


def summed_in_float32(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """fla's gradients inside of chunks, with the states' part of the decay's gradient summed in float32.

    A decay's gradient has ``sum_v(h[k, v] * dh[k, v])`` of the states before a chunk, ``h``, and the gradients of those
    after it, ``dh``. fla 0.6 keeps both in 16 bits, and its kernel multiplies and sums what it has loaded as it is: up
    to 128 numbers, in 16 bits, by which the gradient missed its tolerance. With ``dh`` in float32 the kernel sums in
    float32. It rounds ``dh`` itself where it feeds matrix units.

    Args:
        gradients: fla's function of this name; ``dh`` is ``[B, chunks, HV, K, V]``.
    """

    def kernel(*, dh: Tensor, **inputs: Any) -> Any:
        return gradients(dh=dh.float(), **inputs)

    return kernel
