"""dsa_attention in Triton: each query gathers the rows of its keys, once for many heads, on matrix units.

Forward saves its inputs, its output and two numbers per query and head. Backward computes logits again; gradients of
keys are added by atomics in float32, so their last bits differ from run to run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from veomni_core.kernels import autocast_off, first_derivatives_only, product_operands, without_autocast
from veomni_ops.dsa_attention import check_call, divergence
from veomni_triton.dsa_attention.kernels import forward_kernel, gradients_kernel, target_kernel
from veomni_triton.gpu import gpu_of
from veomni_triton.sizes import ceil_div, power_of_two

_NAMESPACE = "veomni_triton"
_LIBRARY = library.Library(_NAMESPACE, "FRAGMENT")
_INPUTS = "Tensor query, Tensor keys, Tensor indices, float scaling, int value_width"
_LIBRARY.define(f"dsa_attention_forward({_INPUTS}) -> (Tensor output, Tensor norms)")
_SAVED = "Tensor doutput, Tensor output, Tensor norms"
_LIBRARY.define(f"dsa_attention_gradients({_SAVED}, {_INPUTS}) -> (Tensor dquery, Tensor dkeys)")
_LIBRARY.define(f"dsa_attention_target(Tensor norms, {_INPUTS}) -> Tensor")
_NUMBERS = 1 << 26  # in the tensors of a block of the loss
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Launch:
    """Heads of a program, keys of a tile, warps, and the depth of the pipeline of its loop."""

    heads: int
    keys: int
    warps: int
    stages: int


# Not tuned yet: `benchmarks/dsa/triton_dsa.py --tune`. Gradients of 64 heads at a time accessed memory illegally on an
# H100 (Triton 3.6); of 32 they are right.
FORWARD, GRADIENTS = Launch(64, 32, 8, 2), Launch(32, 16, 8, 1)
BYTES = 160 << 10  # of shared memory, which these take
SMALL = Launch(16, 16, 4, 1)  # in float32, and for AMD's GPUs, which have less


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
        ValueError: shapes or dtypes don't fit together.
        TypeError: query and keys differ in dtype without autocast, or are of none of float32, bfloat16 and float16.
    """
    query, keys = product_operands("triton", dtypes=_DTYPES, query=query, keys=keys)
    check_call(query, keys, indices, value_width, index_query, index_key, index_weights)
    if keys.shape[1:].numel() >= 2**31:
        raise ValueError(f"dsa_attention: {keys.shape[1]} keys of {keys.shape[2]} columns are too many; choose torch")
    call = query, keys, indices, float(scaling), value_width
    output, norms = _Attention.apply(*call)
    if index_query is None or index_key is None or index_weights is None:
        return output  # type: ignore[no-any-return]
    with torch.no_grad():
        target = torch.ops.veomni_triton.dsa_attention_target.default(norms, *call)
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
        output, norms = torch.ops.veomni_triton.dsa_attention_forward.default(*call)
        ctx.save_for_backward(*call[:3], output, norms)
        ctx.settings = call[3:]
        ctx.mark_non_differentiable(norms)
        return output, norms

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, doutput: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output, norms = ctx.saved_tensors
        gradients = torch.ops.veomni_triton.dsa_attention_gradients.default
        found = gradients(doutput, output, norms, *inputs, *ctx.settings)
        return (
            *(x if wanted else None for x, wanted in zip(found, ctx.needs_input_grad, strict=False)),
            None,
            None,
            None,
        )


def _forward(query: Tensor, keys: Tensor, indices: Tensor, scaling: float, value_width: int) -> tuple[Tensor, Tensor]:
    output, norms = _results(query, keys, indices, scaling, value_width)
    query, keys, indices = query.contiguous(), keys.contiguous(), indices.contiguous()
    if output.numel():
        grid, sizes, shared = _shared(query, keys, indices, value_width, FORWARD)
        with torch.cuda.device_of(query):
            forward_kernel[grid](query, keys, indices, output, norms, scaling / math.log(2), *sizes, **shared)
    return output, norms


def _gradients(
    doutput: Tensor,
    output: Tensor,
    norms: Tensor,
    query: Tensor,
    keys: Tensor,
    indices: Tensor,
    scaling: float,
    value_width: int,
) -> tuple[Tensor, Tensor]:
    dquery = query.new_empty(query.shape)
    dkeys = keys.new_zeros(keys.shape, dtype=torch.float32)
    query, keys, indices, doutput = query.contiguous(), keys.contiguous(), indices.contiguous(), doutput.contiguous()
    if query.numel():
        grid, sizes, shared = _shared(query, keys, indices, value_width, GRADIENTS)
        tensors = (query, keys, indices, output, norms, doutput, dquery, dkeys)
        with torch.cuda.device_of(query):
            gradients_kernel[grid](*tensors, scaling, scaling / math.log(2), *sizes, **shared)
    return dquery, dkeys.to(keys.dtype)


def _target(norms: Tensor, query: Tensor, keys: Tensor, indices: Tensor, scaling: float, value_width: int) -> Tensor:
    target = indices.new_empty(indices.shape, dtype=torch.float32)
    query, keys, indices = query.contiguous(), keys.contiguous(), indices.contiguous()
    if target.numel():
        (rows, _), sizes, shared = _shared(query, keys, indices, value_width, FORWARD)
        with torch.cuda.device_of(query):
            target_kernel[rows, ceil_div(indices.shape[2], shared["K"])](
                query, keys, indices, norms, target, scaling / math.log(2), *sizes, **shared
            )
    return target


def _shared(
    query: Tensor, keys: Tensor, indices: Tensor, value_width: int, launch: Launch
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """What both kernels are launched with: the grid, the sizes at run time, and those of compilation."""
    batch, queries, heads, width = query.shape
    if query.dtype == torch.float32 or gpu_of(query.device).shared_bytes < BYTES:
        launch = SMALL
    tile = max(16, min(launch.heads, power_of_two(heads)))
    sizes = (queries, keys.shape[1], heads, indices.shape[2], width, value_width)
    constants = {
        "H": tile,
        "K": launch.keys,
        "V": max(16, power_of_two(value_width)),
        "R": max(16, power_of_two(width - value_width)),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }
    return (batch * queries, ceil_div(heads, tile)), sizes, constants


def _results(query: Tensor, keys: Tensor, indices: Tensor, scaling: float, value_width: int) -> tuple[Tensor, Tensor]:
    """The output ``[B, T, H, V]``, and for each query and head its highest logit and its sum ``[2, B, T, H]``."""
    return query.new_empty(*query.shape[:3], value_width), query.new_empty(2, *query.shape[:3], dtype=torch.float32)


def _gradients_like(
    doutput: Tensor, output: Tensor, norms: Tensor, query: Tensor, keys: Tensor, *others: object
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), keys.new_empty(keys.shape)


for _name, _implementation, _fake in (
    ("dsa_attention_forward", _forward, _results),
    ("dsa_attention_gradients", _gradients, _gradients_like),
    (
        "dsa_attention_target",
        _target,
        lambda norms, query, keys, indices, *_: indices.new_empty(indices.shape, dtype=torch.float32),
    ),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.register_fake(f"{_NAMESPACE}::{_name}", _fake, lib=_LIBRARY)
