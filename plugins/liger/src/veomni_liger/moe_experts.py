"""moe_experts by ``LigerFusedMoEFunction``, with pinned configurations instead of minutes of autotuning at first use.

Liger doesn't support dropped routes, and would write outside of its buffers for an index outside ``[0, E)``. So a
dropped route is sent to another expert of its token, with a weight of zero: what it adds is zero wherever the token's
result is finite. It costs as much as any route. A token whose routes are all dropped is left out.

Inputs are made contiguous; transposed weights are copied whole. Liger reads the number of tiles on the host. So a step
waits for the routing, can't be captured in a CUDA graph, and breaks the graph of ``torch.compile``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.kernels import product_operands
from veomni_liger.functions import first_derivative_of
from veomni_liger.pinned_experts import pinned_experts

_GRAPH_BREAK = "fused_liger reads the number of its tiles on the host"
_EXACT = (torch.bfloat16, torch.float16)  # float32 would be multiplied as TF32
_apply = first_derivative_of(pinned_experts()).apply


@torch.compiler.disable(reason=_GRAPH_BREAK)  # type: ignore[untyped-decorator]
def standard(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Sum over a token's experts of ``weight * down(silu(gate) * up)``, gate before up in ``gate_up_proj``.

    ``hidden[T, H]``, ``top_k_index[T, K]``, ``top_k_weights[T, K]``, ``gate_up_proj[E, 2I, H]``,
    ``down_proj[E, H, I]``; returns ``[T, H]`` in hidden's dtype. T tokens, H hidden size, K experts per token, E
    experts, I intermediate size. Sums over experts are float32. An index outside ``[0, E)`` is dropped. Gradients reach
    all inputs but the index; those of the routing weights are summed by atomics in hidden's dtype, so their last bits
    change from run to run. Under autocast, hidden and the projections are cast to its dtype, and the result back to
    hidden's.

    Raises:
        TypeError: hidden and the projections are not all bfloat16, or all float16, and autocast is off.
    """
    rows, gate_up, down = product_operands(
        "fused_liger", dtypes=_EXACT, hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj
    )
    kept = (top_k_index >= 0) & (top_k_index < gate_up_proj.shape[0])
    with torch.cuda.device_of(hidden):
        if kept.all():  # the host waits here, as it does in Liger
            result: Tensor = _apply(rows, gate_up, down, top_k_index.int(), top_k_weights)
        else:
            result = _with_dropped_routes(rows, top_k_index, top_k_weights, gate_up, down, kept)
    return result.to(hidden.dtype)


def _with_dropped_routes(
    rows: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, kept: Tensor
) -> Tensor:
    """The same, where ``kept[T, K]`` is false for some routes."""
    tokens = kept.any(-1).nonzero().squeeze(1)
    # Of no element, so its gradients are zeros, even where an input is infinite.
    zero = sum(each[:0].sum() for each in (rows, weights, gate_up, down))
    result = torch.zeros_like(rows) + zero
    if not len(tokens):
        return result
    index, weights, kept = index[tokens], weights[tokens], kept[tokens]
    first_kept = index.gather(1, kept.int().argmax(-1, keepdim=True))
    index = torch.where(kept, index, first_kept).int()
    computed: Tensor = _apply(rows[tokens], gate_up, down, index, torch.where(kept, weights, 0))
    return result.index_copy(0, tokens, computed)
