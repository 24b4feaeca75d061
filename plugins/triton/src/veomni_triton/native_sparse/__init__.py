"""Native sparse attention in Triton: three branches, each computed as FlashAttention does, and a choice of blocks.

A program of the chosen branch has one query and all heads of a key head, and its gradients of keys have a block and the
queries that chose it, found by sorting: nothing is added by atomics. Forward saves its inputs, the branches' outputs, a
number for each query, head and branch, and the choice. Scores of blocks exist for some queries at a time.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only, product_operands, without_autocast
from veomni_ops.native_sparse import Sizes, check_call
from veomni_triton.native_sparse import operators

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def native_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    window_key: Tensor | None = None,
    window_value: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    scaling: float | None = None,
    **sizes: int,
) -> Tensor:
    """``[B, T, H, V]``, with gradients of all tensors but the bounds.

    Raises:
        ValueError: shapes, dtypes or sizes don't fit together.
        TypeError: keys or values differ from query in dtype without autocast, or are of none of float32, bfloat16 and
            float16.
    """
    made = Sizes(**sizes)
    named = {"query": query, "key": key, "value": value}
    named |= {"compressed_key": compressed_key, "compressed_value": compressed_value}
    of_window = {"window_key": window_key, "window_value": window_value}
    named |= {name: tensor for name, tensor in of_window.items() if tensor is not None}
    cast = dict(zip(named, product_operands("native-sparse", dtypes=_DTYPES, **named), strict=True))
    query, key, value, compressed_key, compressed_value = list(cast.values())[:5]
    window_key, window_value = cast.get("window_key"), cast.get("window_value")
    tensors = query, key, value, compressed_key, compressed_value, window_key, window_value, gates
    check_call(*tensors[:5], gates, window_key, window_value, cu_seq_lens, made)
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return _NativeSparse.apply(*tensors, cu_seq_lens, scaling, list(astuple(made)))[0]  # type: ignore[no-any-return]


class _NativeSparse(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, ...]:
        output, *saved = operators.native_sparse_forward(*call)
        ctx.save_for_backward(*saved, *call[:9])
        ctx.settings = call[9:]
        ctx.mark_non_differentiable(*saved)
        return output, *saved

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        found = operators.native_sparse_gradients(doutput, *ctx.saved_tensors, *ctx.settings)
        wanted = (x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False))
        return *wanted, None, None, None
