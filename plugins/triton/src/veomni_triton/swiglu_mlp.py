"""swiglu_mlp: one pass forward, one pass backward that writes both gradients; saves only ``gate`` and ``up``.

Gate and up may be halves of one packed projection: they are read in place, without a copy. All arithmetic is float32,
and the result is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import Function

from veomni_core.ops.first_derivatives import first_derivatives_only
from veomni_triton.gated_kernels import backward_kernel, forward_kernel
from veomni_triton.sizes import ceil_div

# 16 elements for each thread of 8 warps. In either pass within 1 % of the fastest on an H200, by
# `benchmarks/swiglu_mlp/triton_swiglu_mlp.py --tune`.
COLUMNS, NUM_WARPS = 4096, 8


def standard(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, with gradients of both, all in the inputs' dtype.

    Args:
        gate: ``[..., I]``.
        up: Of the same shape and dtype; strides may differ.

    Returns:
        ``[..., I]``, contiguous.

    Raises:
        ValueError: gate and up differ in shape or dtype.
    """
    return _gated(gate, up, False)


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with GELU's tanh approximation; otherwise as :func:`standard`."""
    return _gated(gate, up, True)


def _gated(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} of {tuple(gate.shape)} and up is {up.dtype} of {tuple(up.shape)}: expected the same"
        )
    return _GatedActivation.apply(gate, up, tanh)


class _GatedActivation(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh = tanh
        return _forward(gate, up, tanh)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(dresult, *ctx.saved_tensors, ctx.tanh), None


def activated(gate: Tensor, up: Tensor, tanh: bool, columns: int = COLUMNS, num_warps: int = NUM_WARPS) -> Tensor:
    """Launch the forward: ``[..., I]`` from ``gate[..., I]`` and ``up[..., I]``.

    ``columns`` and ``num_warps`` are parameters for the benchmark's search.
    """
    gate_rows, up_rows = _rows(gate), _rows(up)
    result = _result(gate)
    if result.numel():
        grid = (len(gate_rows), ceil_div(gate.shape[-1], columns))
        with torch.cuda.device_of(gate):
            forward_kernel[grid](
                gate_rows,
                up_rows,
                result,
                gate_rows.stride(0),
                up_rows.stride(0),
                gate.shape[-1],
                TANH=tanh,
                COLUMNS=columns,
                num_warps=num_warps,
            )
    return result


def gradients(
    dresult: Tensor, gate: Tensor, up: Tensor, tanh: bool, columns: int = COLUMNS, num_warps: int = NUM_WARPS
) -> tuple[Tensor, Tensor]:
    """Launch the backward: the gradients of gate and up, ``[..., I]`` each, contiguous."""
    upstream, gate_rows, up_rows = _rows(dresult), _rows(gate), _rows(up)
    dgate, dup = _result(gate), _result(up)
    if dgate.numel():
        grid = (len(gate_rows), ceil_div(gate.shape[-1], columns))
        with torch.cuda.device_of(gate):
            backward_kernel[grid](
                upstream,
                gate_rows,
                up_rows,
                dgate,
                dup,
                upstream.stride(0),
                gate_rows.stride(0),
                up_rows.stride(0),
                gate.shape[-1],
                TANH=tanh,
                COLUMNS=columns,
                num_warps=num_warps,
            )
    return dgate, dup


def _rows(x: Tensor) -> Tensor:
    """``x`` as ``[R, I]`` with contiguous rows, one stride apart: a view where its strides allow it, else a copy."""
    # With I = 0, reshape could not infer -1.
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _result(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


# Operators, so that ``torch.compile`` doesn't trace into them. Defined through a ``Library`` rather than by
# ``custom_op``, which puts more Python around each call.
_LIBRARY = library.Library("veomni_triton", "FRAGMENT")
_LIBRARY.define("gated_activation(Tensor gate, Tensor up, bool tanh) -> Tensor")
_LIBRARY.define(
    "gated_activation_backward(Tensor dresult, Tensor gate, Tensor up, bool tanh) -> (Tensor dgate, Tensor dup)"
)


def _forward_operator(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    return activated(gate, up, tanh)


def _backward_operator(dresult: Tensor, gate: Tensor, up: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return gradients(dresult, gate, up, tanh)


for _name, _implementation, _fake in (
    ("gated_activation", _forward_operator, lambda gate, up, tanh: _result(gate)),
    ("gated_activation_backward", _backward_operator, lambda dresult, gate, up, tanh: (_result(gate), _result(up))),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    library.register_fake(f"veomni_triton::{_name}", _fake, lib=_LIBRARY)
_forward = torch.ops.veomni_triton.gated_activation.default
_backward = torch.ops.veomni_triton.gated_activation_backward.default
