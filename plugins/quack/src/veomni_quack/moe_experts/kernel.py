"""The experts: the function that is bound."""

from __future__ import annotations

from torch import Tensor

from veomni_core.kernels import product_operands
from veomni_quack.compiling import check_dtypes
from veomni_quack.moe_experts.alignment import padded
from veomni_quack.moe_experts.operators import forward


def standard(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``.

    ``hidden[T, H]``, ``top_k_index[T, K]`` (outside ``[0, E)`` is dropped), ``top_k_weights[T, K]``,
    ``gate_up_proj[E, 2I, H]`` with gate first, ``down_proj[E, H, I]``; returns ``[T, H]``. T tokens, H hidden size, K
    experts per token, E experts, I intermediate size.

    Operands are bfloat16 or float16. Products and sums are float32; pre-activations, activations and the experts'
    outputs are rounded to hidden's dtype. Gradients reach all inputs but the index; the weights of experts without
    tokens get zeros. Under autocast hidden and the projections are cast to its dtype, and the result back to hidden's.

    Operands whose sizes are no multiple of 8, and weights whose last dimension isn't contiguous, are copied.

    Raises:
        TypeError: hidden and projections are not all bfloat16, or all float16.
    """
    operands = product_operands("fused_quack", hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj)
    check_dtypes("fused_quack", *operands)
    tokens, gate_up, down = padded(*operands)
    result: Tensor = forward(tokens, top_k_index, top_k_weights, gate_up, down)[0]
    # padded() returns hidden itself if H needed no padding; otherwise cut the result back to [T, H].
    result = result if tokens is operands[0] else result[:, : hidden.shape[1]]
    return result.to(hidden.dtype)
