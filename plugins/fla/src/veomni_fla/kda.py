"""kda by flash-linear-attention's ``chunk_kda``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from veomni_fla.delta_rules import Call, adapted, even
from veomni_fla.loading import of_fla
from veomni_fla.pinned import pinned
from veomni_ops.kda import check_call

_GRADIENTS, _STATES = "chunk_kda_bwd_wy_dqkg_fused", "chunk_gated_delta_rule_fwd_h"


def fla() -> Call:
    """fla's function, with its Triton kernels throughout, and gates of any size.

    Raises:
        ImportError: fla can't be imported.
    """
    gradients = pinned(of_fla("ops.kda.chunk_bwd", _GRADIENTS))
    states = pinned(of_fla("ops.common.chunk_delta_h", _STATES))
    chosen = {_GRADIENTS: summed_in_float32(gradients), _STATES: final_state_of_float32(states)}
    return adapted("fla", pinned(of_fla("ops.kda.chunk", "chunk_kda"), chosen), check_call, even)


def final_state_of_float32(states: Callable[..., Any]) -> Callable[..., Any]:
    """fla's states before each chunk of ``k[B, S, HV, K]``; for a final one, corrections of the values stay in float32.

    fla's kernel rounds them to the dtype of ``k``, the third time on their way. Where two tokens nearly cancelled each
    other, a state missed its tolerance in bfloat16 by a twentieth. With ``k`` in float32 nothing is rounded but by
    TF32, which has all bits of ``k``. Training keeps no final state.
    """

    def kernel(*, k: Tensor, output_final_state: bool, **inputs: Any) -> Any:
        return states(k=k.float() if output_final_state else k, output_final_state=output_final_state, **inputs)

    return kernel


def summed_in_float32(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """fla's gradients inside of chunks, with the states' part of the decay's gradient summed in float32.

    A decay's gradient has ``sum_v(h[k, v] * dh[k, v])`` of the states before a chunk, ``h``, and the gradients of those
    after it, ``dh``. fla 0.6 keeps both in 16 bits, and its kernel multiplies and sums what it has loaded as it is: up
    to 128 numbers, in 16 bits, by which the gradient missed its tolerance. With ``dh`` in float32 the kernel sums in
    float32. It rounds ``dh`` itself where it feeds matrix units. ``dh`` is ``[B, chunks, HV, K, V]``.
    """

    def kernel(*, dh: Tensor, **inputs: Any) -> Any:
        return gradients(dh=dh.float(), **inputs)

    return kernel
