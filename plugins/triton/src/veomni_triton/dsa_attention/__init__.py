"""dsa_attention in Triton: each query gathers the rows of its keys, once for many heads, on matrix units.

Forward saves its inputs, its output and two numbers per query and head. Backward computes logits again; gradients of
keys are added by atomics in float32, so their last bits differ from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from veomni_core.kernels import autocast_off, first_derivatives_only, product_operands, without_autocast
from veomni_ops.dsa_attention import check_call, divergence
from veomni_triton.dsa_attention import operators

_NUMBERS = 1 << 26  # in the tensors of a block of the loss
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def standard(
    query: Tensor,
    keys: Tensor,
    indices: Tensor,
    scaling: float,
    value_width: int,
    index_query: Tensor | None = None,
    index_key: Tensor | None = None,
    index_weights: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``[B, T, H, V]``, with gradients of ``query`` and ``keys``, and with the indexer's inputs its loss ``[B, T]``.

    Raises:
        ValueError: shapes or dtypes don't fit together, or ``scaling`` is not positive.
        TypeError: query and keys differ in dtype without autocast, or are of none of float32, bfloat16 and float16.
    """
    query, keys = product_operands("triton", dtypes=_DTYPES, query=query, keys=keys)
    check_call(query, keys, indices, value_width, index_query, index_key, index_weights)
    if keys.shape[1:].numel() >= 2**31:
        raise ValueError(f"dsa_attention: {keys.shape[1]} keys of {keys.shape[2]} columns are too many; choose torch")
    if scaling <= 0:
        raise ValueError(f"dsa_attention: scaling is {scaling}, and this kernel takes positive ones; choose torch")
    call = query, keys, indices, float(scaling), value_width
    output, norms = _Attention.apply(*call)
    if index_query is None or index_key is None or index_weights is None:
        return output  # type: ignore[no-any-return]
    with torch.no_grad():
        target = operators.dsa_attention_target(norms, *call)
    return output, _loss(index_query, index_key, index_weights, indices, target)


def made(indexer_loss: float = 0.0) -> Any:
    """The kernel. The binding reads how much of the indexer's loss counts, and then passes the indexer's inputs."""
    return standard


def _loss(index_query: Tensor, index_key: Tensor, index_weights: Tensor, indices: Tensor, target: Tensor) -> Tensor:
    """The divergence, in plain PyTorch: of a block of queries at a time, and again in backward."""
    batch, length, heads, width = index_query.shape
    size = max(1, _NUMBERS // max(1, batch * indices.shape[2] * (heads + width)))
    with autocast_off(index_query.device.type):
        losses = [
            checkpoint(
                divergence,
                index_query[:, rows],
                index_key,
                index_weights[:, rows],
                indices[:, rows],
                target[:, rows],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for rows in (slice(first, first + size) for first in range(0, length, size))
        ]
    return torch.cat([target.new_empty(batch, 0), *losses], dim=1)


class _Attention(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        output, norms = operators.dsa_attention_forward(*call)
        ctx.save_for_backward(*call[:3], output, norms)
        ctx.settings = call[3:]
        ctx.mark_non_differentiable(norms)
        return output, norms

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output, norms = ctx.saved_tensors
        gradients = operators.dsa_attention_gradients
        found = gradients(doutput, output, norms, *inputs, *ctx.settings)
        return (
            *(x if wanted else None for x, wanted in zip(found, ctx.needs_input_grad, strict=False)),
            None,
            None,
            None,
        )
