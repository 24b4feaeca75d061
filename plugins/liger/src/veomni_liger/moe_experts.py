"""moe_experts by ``LigerFusedMoEFunction``, in pinned configurations instead of a search of minutes at first use.

Liger knows no route to nowhere, and would write outside of its buffers for one. So a dropped route goes to expert 0
with a weight of zero: it adds nothing to the result or to any gradient while expert 0 stays finite for that token
(where that overflows, zero times infinity is no number), and costs what a route costs.

Inputs are made contiguous; transposed weights are copied whole. The number of tiles is read on the host, so a step
waits for the routing, no CUDA graph holds it, and ``torch.compile`` breaks the graph here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_core.ops.autocast import product_operands
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
    ``down_proj[E, H, I]`` give ``[T, H]`` of hidden's dtype, summed over experts in float32. An index outside
    ``[0, E)`` is dropped. Gradients reach everything but the index; those of the routing weights are summed by
    atomics in hidden's dtype, so their last bits change from run to run. Under autocast all of this is in its dtype,
    but for the result's.

    Raises:
        TypeError: hidden and the projections are not all bfloat16, or all float16, and autocast is off.
    """
    rows, gate_up, down = product_operands(
        "fused_liger", dtypes=_EXACT, hidden=hidden, gate_up_proj=gate_up_proj, down_proj=down_proj
    )
    kept = (top_k_index >= 0) & (top_k_index < gate_up_proj.shape[0])
    index = torch.where(kept, top_k_index, 0).int()
    weights = torch.where(kept, top_k_weights, 0)
    with torch.cuda.device_of(hidden):
        result: Tensor = _apply(rows, gate_up, down, index, weights)
    return result.to(hidden.dtype)
