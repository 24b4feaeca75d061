"""The kernels of forward and backward, one after the other, on tensors that were checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from veomni_triton.chunk_gated_delta_rule.corrections import corrections_kernel
from veomni_triton.chunk_gated_delta_rule.gradients import (
    key_gradients_kernel,
    product_gradients_kernel,
    query_gradients_kernel,
    shared_gradients_kernel,
)
from veomni_triton.chunk_gated_delta_rule.launch import (
    SHARED_TILE,
    Launch,
    chunk_length,
    columns,
    launches,
    padded,
    precision,
)
from veomni_triton.chunk_gated_delta_rule.outputs import correction_gradients_kernel, outputs_kernel
from veomni_triton.chunk_gated_delta_rule.states import state_gradients_kernel, states_kernel


@dataclass(frozen=True)
class Call:
    """The inputs of a call, laid out by :func:`token_rows`.

    Attributes:
        q, k: ``[B, S, H, K]``.
        v: ``[B, S, HV, V]``.
        g, beta: ``[B, S, HV]``.
        chunks, spans: of :mod:`veomni_triton.chunk_gated_delta_rule.chunks`.
        scale: multiplies the queries.
        normed: whether queries and keys are divided by their norms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    chunks: Tensor
    spans: Tensor
    scale: float
    normed: bool

    @classmethod
    def of(cls, inputs: Iterable[Tensor], chunks: Tensor, spans: Tensor, scale: float, normed: bool) -> Call:
        """That of the ``inputs`` q, k, v, g and beta."""
        q, k, v, g, beta = (token_rows(x) for x in inputs)
        return cls(q, k, v, g, beta, chunks, spans, scale, normed)

    @property
    def heads(self) -> int:
        """Heads of queries and keys."""
        return self.q.shape[2]

    @property
    def value_heads(self) -> int:
        """Heads of values."""
        return self.v.shape[2]

    @property
    def widths(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.q.shape[3], self.v.shape[3]

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return len(self.spans)

    def shared(self, launch: Launch) -> dict[str, Any]:
        """What every kernel is launched with."""
        key_width, value_width = self.widths
        return {
            "GROUP": self.value_heads // self.heads,
            "C": chunk_length(key_width, value_width),
            "K": padded(key_width),
            "V": columns(launch, value_width),
            "PRECISION": precision(self.q.dtype),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            "maxnreg": launch.registers,
        }

    def per_token(self, *width: int) -> Tensor:
        """A new tensor with numbers for each token and value head."""
        batch, length = self.q.shape[:2]
        return self._empty((batch, length, self.value_heads), width)

    def per_chunk(self, *shape: int) -> Tensor:
        """A new tensor with a matrix for each chunk and value head."""
        return self._empty((len(self.chunks), self.value_heads), shape)

    def _empty(self, places: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Matrices and rows have the dtype of the inputs, single numbers float32."""
        return self.q.new_empty((*places, *shape), dtype=self.q.dtype if shape else torch.float32)


@dataclass(frozen=True)
class Corrections:
    """What forward and backward both need of the chunks; see the kernels that write it."""

    x: Tensor
    w: Tensor
    inverse: Tensor | None
    write_scale: Tensor
    left: Tensor
    before: Tensor


def token_rows(x: Tensor) -> Tensor:
    """``x [B, S, ...]``, or a copy whose last dimension is dense and whose tokens of all rows are equally far apart."""
    batch, length = x.shape[:2]
    is_dense = x.dim() == 3 or x.stride(-1) == 1 or x.shape[-1] == 1
    is_regular = batch == 1 or length == 0 or x.stride(0) == length * x.stride(1)
    return x if is_dense and is_regular else x.contiguous()


def corrected(call: Call, initial: Tensor | None, final: Tensor | None, keeps_inverse: bool) -> Corrections:
    """The corrections of all tokens, and the states before chunks; those after the last are written into ``final``."""
    (key_width, value_width), heads = call.widths, call.value_heads
    launch, size = launches(call.q.dtype), chunk_length(*call.widths)
    x, w, left = call.per_token(value_width), call.per_token(key_width), call.per_chunk()
    inverse, write_scale = call.per_chunk(size, size) if keeps_inverse else None, call.per_token()
    before = call.per_chunk(key_width, value_width)
    if len(call.chunks):
        corrections_kernel[(heads, len(call.chunks))](
            call.k,
            call.v,
            call.g,
            call.beta,
            call.chunks,
            x,
            w,
            x if inverse is None else inverse,
            write_scale,
            left,
            *call.k.stride()[1:3],
            *call.v.stride()[1:3],
            *call.g.stride()[1:],
            *call.beta.stride()[1:],
            key_width,
            value_width,
            heads,
            NORMED=call.normed,
            KEEPS_INVERSE=keeps_inverse,
            **call.shared(launch.corrections),
        )
    shared = call.shared(launch.states)
    states_kernel[(triton.cdiv(value_width, shared["V"]), heads, call.sequences)](
        call.k,
        w,
        x,
        write_scale,
        left,
        call.chunks,
        call.spans,
        left if initial is None else initial,
        before,
        left if final is None else final,
        *call.k.stride()[1:3],
        key_width,
        value_width,
        heads,
        HAS_INITIAL=initial is not None,
        HAS_FINAL=final is not None,
        **shared,
    )
    return Corrections(x, w, inverse, write_scale, left, before)


def write_outputs(call: Call, corrections: Corrections, out: Tensor) -> None:
    """The outputs of all tokens."""
    shared = call.shared(launches(call.q.dtype).outputs)
    outputs_kernel[(triton.cdiv(call.widths[1], shared["V"]), call.value_heads, len(call.chunks))](
        call.q,
        call.k,
        call.g,
        corrections.x,
        corrections.before,
        call.chunks,
        out,
        call.scale,
        *call.q.stride()[1:3],
        *call.k.stride()[1:3],
        *call.g.stride()[1:],
        *call.widths,
        call.value_heads,
        NORMED=call.normed,
        **shared,
    )


def write_gradients(
    call: Call,
    corrections: Corrections,
    dout: Tensor,
    dfinal: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    dinitial: Tensor | None,
) -> None:
    """The gradients of q, k, v, g and beta, and of the initial states."""
    (key_width, value_width), heads = call.widths, call.value_heads
    launch = launches(call.q.dtype)
    dx, read_scale, dafter = call.per_token(value_width), call.per_token(), torch.empty_like(corrections.before)
    strides = (*call.q.stride()[1:3], *call.k.stride()[1:3])
    if len(call.chunks):
        correction_gradients_kernel[(heads, len(call.chunks))](
            call.q,
            call.k,
            call.g,
            dout,
            call.chunks,
            dx,
            read_scale,
            call.scale,
            *strides,
            *call.g.stride()[1:],
            *dout.stride()[1:3],
            key_width,
            value_width,
            heads,
            NORMED=call.normed,
            **call.shared(launch.correction_gradients),
        )
    shared = call.shared(launch.state_gradients)
    state_gradients_kernel[(triton.cdiv(value_width, shared["V"]), heads, call.sequences)](
        call.q,
        call.k,
        corrections.w,
        dout,
        dx,
        read_scale,
        corrections.write_scale,
        corrections.left,
        call.chunks,
        call.spans,
        corrections.left if dfinal is None else dfinal,
        dafter,
        corrections.left if dinitial is None else dinitial,
        *strides,
        *dout.stride()[1:3],
        key_width,
        value_width,
        heads,
        HAS_FINAL=dfinal is not None,
        HAS_INITIAL=dinitial is not None,
        **shared,
    )
    if len(call.chunks):
        dq, dk, dv, dg, dbeta = gradients
        size = chunk_length(key_width, value_width)
        dscores, dproducts = call.per_chunk(size, size), call.per_chunk(size, size)
        dg_known, dbeta_known = call.per_token(), call.per_token()
        places, sizes = (*call.g.stride()[1:], *call.beta.stride()[1:]), (key_width, value_width, heads)
        grid = (heads, len(call.chunks))
        product_gradients_kernel[grid](
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            corrections.x,
            corrections.inverse,
            dout,
            dx,
            call.chunks,
            dscores,
            dproducts,
            dv,
            dg_known,
            dbeta_known,
            call.scale,
            *strides,
            *call.v.stride()[1:3],
            *places,
            *dout.stride()[1:3],
            *sizes,
            NORMED=call.normed,
            **call.shared(launch.product_gradients),
        )
        is_shared = heads > call.heads
        parts = [call.per_token(key_width) if is_shared else each for each in (dq, dk)]
        query_gradients_kernel[grid](
            call.q,
            call.k,
            call.g,
            corrections.before,
            dout,
            dscores,
            call.chunks,
            parts[0],
            dg_known,
            call.scale,
            *strides,
            *call.g.stride()[1:],
            *dout.stride()[1:3],
            *sizes,
            NORMED=call.normed,
            **call.shared(launch.query_gradients),
        )
        key_gradients_kernel[grid](
            call.q,
            call.k,
            call.g,
            call.beta,
            corrections.x,
            corrections.before,
            dafter,
            dx,
            dscores,
            dproducts,
            dg_known,
            dbeta_known,
            call.chunks,
            parts[1],
            dg,
            dbeta,
            call.scale,
            *strides,
            *places,
            *sizes,
            NORMED=call.normed,
            **call.shared(launch.key_gradients),
        )
        if is_shared:
            for each, total in zip(parts, (dq, dk), strict=True):
                _add_shared(each, total, heads // call.heads)


def _add_shared(each: Tensor, total: Tensor, group: int) -> None:
    """Into ``total [B, S, H, K]`` the sums of ``each [B, S, H * group, K]`` over the value heads of a key head."""
    width, rows = total.shape[-1], total.numel() // total.shape[-1]
    columns = padded(width)
    tile = max(1, SHARED_TILE // columns)
    shared_gradients_kernel[(triton.cdiv(rows, tile),)](each, total, rows, width, GROUP=group, R=tile, K=columns)
