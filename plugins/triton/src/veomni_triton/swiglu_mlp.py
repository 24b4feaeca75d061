"""swiglu_mlp: one pass forward, one pass backward that writes both gradients; saves only ``gate`` and ``up``.

Gate and up may be halves of one packed projection: they are read in place, without a copy. All arithmetic is float32,
and the result is rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only
from veomni_ops.sizes import ceil_div
from veomni_ops.torch_operators import operator
from veomni_triton.gated_kernels import backward_kernel, forward_kernel


class Launch(NamedTuple):
    """Each program, of ``num_warps`` warps, has ``columns`` adjacent columns of one row."""

    columns: int
    num_warps: int


# 16 elements for each thread. For SiLU and the exact GELU in either pass within 1 % of the fastest on an H200, by
# `benchmarks/swiglu_mlp/triton_swiglu_mlp.py --tune`; GELU by tanh has SiLU's launch. With that one the forward of the
# exact GELU takes 0.20 ms in place of 0.15, for 16384 rows of 6144.
LAUNCHES = {"silu": Launch(4096, 8), "gelu_tanh": Launch(4096, 8), "gelu": Launch(2048, 4)}


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
    return _gated(gate, up, "silu")


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the exact error function; otherwise as :func:`standard`."""
    return _gated(gate, up, "gelu")


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with GELU's tanh approximation; otherwise as :func:`standard`."""
    return _gated(gate, up, "gelu_tanh")


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} of {tuple(gate.shape)} and up is {up.dtype} of {tuple(up.shape)}: expected the same"
        )
    return _GatedActivation.apply(gate, up, activation)


class _GatedActivation(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, dresult: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(dresult, *ctx.saved_tensors, ctx.activation), None


def activated(gate: Tensor, up: Tensor, activation: str, launch: Launch | None = None) -> Tensor:
    """Launch the forward.

    Args:
        gate: ``[..., I]``.
        up: ``[..., I]``.
        activation: The name that the kernel knows it by.
        launch: For the benchmark's search; by default what it has found.

    Returns:
        ``[..., I]``, contiguous.
    """
    columns, num_warps = launch or LAUNCHES[activation]
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
                ACTIVATION=activation,
                COLUMNS=columns,
                num_warps=num_warps,
            )
    return result


def gradients(
    dresult: Tensor, gate: Tensor, up: Tensor, activation: str, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the backward: the gradients of gate and up, ``[..., I]`` each, contiguous; the rest as for the forward."""
    columns, num_warps = launch or LAUNCHES[activation]
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
                ACTIVATION=activation,
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


_forward = operator(
    "veomni_triton::gated_activation(Tensor gate, Tensor up, str activation) -> Tensor",
    activated,
    lambda gate, up, activation: _result(gate),
)
_backward = operator(
    "veomni_triton::gated_activation_backward(Tensor dresult, Tensor gate, Tensor up, str activation)"
    " -> (Tensor dgate, Tensor dup)",
    gradients,
    lambda dresult, gate, up, activation: (_result(gate), _result(up)),
)
