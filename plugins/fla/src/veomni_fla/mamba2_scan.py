"""mamba2_scan by the package mamba-ssm's ``mamba_chunk_scan_combined``.

The package's output has x's dtype, and the op's is float32: it is rounded once more than in float32, within the
contract. Its kernels clamp time steps and decays by operations that drop a NaN. So an infinite time step stands for a
NaN, which makes the results infinite or NaN, and an ``A`` that is not finite makes its head's results NaN.

fla-core has no function of this op. Time steps, their softplus, their limits and ``D`` would have to be computed around
its ``simple_gla``, in passes over memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from veomni_core.kernels import product_operands
from veomni_fla.loading import of_library
from veomni_fla.pinned import pinned
from veomni_ops.mamba2_scan import UNLIMITED, check_call

Kernel = Callable[..., tuple[Tensor, Tensor | None]]
_CHUNK = 256  # what Mamba 2's configs have
_EXACT = (torch.bfloat16, torch.float16)  # float32 would be multiplied as TF32
_GRAPH_BREAK = "the library chooses its launches on the host"


def mamba_ssm() -> Kernel:
    """The package's function.

    Raises:
        ImportError: the package can't be imported.
    """
    return adapted(pinned(of_library("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")))


def adapted(library: Callable[..., Any]) -> Kernel:
    """The kernel by a function of the package's arguments."""

    @torch.compiler.disable(reason=_GRAPH_BREAK)  # type: ignore[untyped-decorator]
    def kernel(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] = UNLIMITED,
        return_final_states: bool = False,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        check_call(x, dt, A, B, C, D, dt_bias, initial_states, dt_limit, seq_idx)
        values, writes, reads = product_operands("mamba_ssm", dtypes=_EXACT, x=x, B=B, C=C)
        if not x.numel():
            return _of_nothing((x, dt, A, B, C, D, dt_bias), initial_states, return_final_states)
        # The package's backward asserts of the gradients, which it lays out as what came, that channels are neighbours.
        values, writes, reads = (
            each if each.stride(-1) == 1 else each.contiguous() for each in (values, writes, reads)
        )
        steps = dt if dt_bias is None else dt.float() + dt_bias
        low, high = float(dt_limit[0]), math.inf if dt_limit[1] is None else float(dt_limit[1])
        if high < math.inf:  # what stands for a NaN would be clamped too
            steps = (F.softplus(steps) if dt_softplus else steps).clamp(low, high)
            dt_softplus, high = False, math.inf
        mark = A.detach().float() * 0.0  # [H]: 0, or NaN for a head whose A is not finite
        result = library(
            values,
            steps.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf),
            A.float(),
            writes,
            reads,
            _CHUNK,
            D=mark if D is None else D + mark,
            dt_bias=None,
            initial_states=None if initial_states is None else initial_states.float(),
            seq_idx=None if seq_idx is None else _numbered(seq_idx),
            dt_softplus=dt_softplus,
            dt_limit=(low, high),
            return_final_states=return_final_states,
        )
        output, states = result if return_final_states else (result, None)
        return output.float(), None if states is None else states.float() + mark.view(1, -1, 1, 1)

    return kernel


def _numbered(seq_idx: Tensor) -> Tensor:
    """Numbers ``[B, S]`` from 0 that rise by one where a sequence begins.

    The package compares the numbers of two tokens wherever they stand, and takes 0 for the sequence of initial states.
    """
    begins = seq_idx[:, 1:] != seq_idx[:, :-1]
    return F.pad(begins.cumsum(1, dtype=torch.int32), (1, 0)).contiguous()


def _of_nothing(
    inputs: tuple[Tensor | None, ...], initial_states: Tensor | None, return_final_states: bool
) -> tuple[Tensor, Tensor | None]:
    """An empty output, and the states as they were. Gradients are zeros, and none is missing."""
    x, _, _, B, *_ = inputs
    assert x is not None and B is not None
    nothing = sum((each[:0].sum().float() for each in inputs if each is not None), start=x.new_zeros(()).float())
    output = torch.zeros_like(x, dtype=torch.float32) + nothing
    if not return_final_states:
        return output, None
    shape = (x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    state = x.new_zeros(shape, dtype=torch.float32) if initial_states is None else initial_states.float()
    return output, state + nothing
