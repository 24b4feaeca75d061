"""Forward and backward: programs that walk over the tokens of one row of the batch with a few neighbouring channels.

The state is in registers, ``[N, K]``. Channels lie together in memory. A sub-block of a chunk is as many tokens as the
registers hold states of: backward walks through it forward and then back. Where a chunk begins forward has saved the
state, and where a sub-block begins backward writes it down first, which stays in the GPU's cache.

Shape legend: ``K`` channels of a program, ``N`` columns of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_ops.triton_launches import triton_kernel
from veomni_triton.softplus import softplus

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Triton compiles a kernel anew for numbers that are 1 or multiples of 16. That pays for the strides of tokens alone.
NOT_SPECIALIZED = ("length", "chunks", "blocks", "rows", "seq_batch", "seq_token")


@triton.jit
def _step(dt, channel_K, bias_K, inside_K, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr):
    """The time steps of a token, and their derivative by ``dt``."""
    step_K = tl.load(dt + channel_K, mask=inside_K, other=0.0).to(tl.float32)
    if HAS_BIAS:
        step_K += bias_K
    if SOFTPLUS:
        step_K, share_K = softplus(step_K)
    else:
        share_K = tl.full(step_K.shape, 1.0, tl.float32)
    return tl.where(inside_K, step_K, 0.0), share_K


@triton.jit
def _is_first(seq_idx, token, length, seq_token):
    """Whether a packed sequence begins at ``token``, which is not the first of its row."""
    compared = (token > 0) & (token < length)
    own = tl.load(seq_idx + token * seq_token, mask=compared, other=0)
    return own != tl.load(seq_idx + (token - 1) * seq_token, mask=compared, other=0)


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def outputs_kernel(
    x,  # [B, S, CHANNELS], as dt, z and out
    dt,
    z,  # or anything
    A,  # [CHANNELS, STATE], as initial and final of each row
    B,  # [B, S, STATE], as C
    C,
    D,  # [CHANNELS], as bias, or anything
    bias,
    initial,  # or anything
    seq_idx,  # [B, S] integers, or anything
    out,
    borders,  # [B, chunks, STATE, CHANNELS] float32: the state before each chunk, or anything
    final,  # or anything
    x_batch,
    x_token,
    dt_batch,
    dt_token,
    z_batch,
    z_token,
    b_batch,
    b_token,
    c_batch,
    c_token,
    seq_batch,
    seq_token,
    length,
    chunks,
    channels,
    blocks,
    HAS_Z: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_BORDERS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    STATE: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    channel_K, column_N = block * K + tl.arange(0, K), tl.arange(0, N)
    is_channel_K, is_column_N = channel_K < channels, column_N < STATE
    inside_NK = is_column_N[:, None] & is_channel_K[None, :]
    by_state_NK = channel_K[None, :].to(tl.int64) * STATE + column_N[:, None]
    by_channel_NK = column_N[:, None].to(tl.int64) * channels + channel_K[None, :]
    A_NK = tl.load(A + by_state_NK, mask=inside_NK, other=0.0).to(tl.float32) * _LOG2_E
    D_K = tl.load(D + channel_K, mask=is_channel_K & HAS_D, other=0.0).to(tl.float32)
    bias_K = tl.load(bias + channel_K, mask=is_channel_K & HAS_BIAS, other=0.0).to(tl.float32)
    x += row * x_batch
    dt += row * dt_batch
    z += row * z_batch
    B += row * b_batch
    C += row * c_batch
    seq_idx += row * seq_batch
    out += row * length * channels
    own = row * channels * STATE
    if HAS_INITIAL:
        state_NK = tl.load(initial + own + by_state_NK, mask=inside_NK, other=0.0).to(tl.float32)
    else:
        state_NK = tl.zeros([N, K], tl.float32)
    for chunk in range(0, chunks):
        if HAS_BORDERS:
            border = borders + (row * chunks + chunk) * channels * STATE
            tl.store(border + by_channel_NK, state_NK, mask=inside_NK)
        for first in range(chunk * L, tl.minimum(chunk * L + L, length), T):
            for ahead in tl.static_range(T):
                token = tl.cast(first + ahead, tl.int64)
                is_inside = token < length
                inside_K = is_channel_K & is_inside
                step_K, _ = _step(dt + token * dt_token, channel_K, bias_K, inside_K, HAS_BIAS, SOFTPLUS)
                x_K = tl.load(x + token * x_token + channel_K, mask=inside_K, other=0.0).to(tl.float32)
                B_N = tl.load(B + token * b_token + column_N, mask=is_column_N & is_inside, other=0.0).to(tl.float32)
                C_N = tl.load(C + token * c_token + column_N, mask=is_column_N & is_inside, other=0.0).to(tl.float32)
                if PACKED:
                    state_NK = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, state_NK)
                state_NK *= tl.exp2(step_K[None, :] * A_NK)
                state_NK += (step_K * x_K)[None, :] * B_N[:, None]
                out_K = tl.sum(state_NK * C_N[:, None], axis=0) + D_K * x_K
                if HAS_Z:
                    z_K = tl.load(z + token * z_token + channel_K, mask=inside_K, other=0.0).to(tl.float32)
                    out_K *= z_K * tl.sigmoid(z_K)
                tl.store(out + token * channels + channel_K, out_K, mask=inside_K)
    if HAS_FINAL:
        tl.store(final + own + by_state_NK, state_NK, mask=inside_NK)


@triton_kernel(do_not_specialize=NOT_SPECIALIZED)
def gradients_kernel(
    dout,  # [B, S, CHANNELS], as x, dt, z, and their gradients
    dfinal,  # [B, CHANNELS, STATE] float32, or anything
    x,
    dt,
    z,  # or anything
    A,  # [CHANNELS, STATE]
    B,  # [B, S, STATE], as C
    C,
    D,  # [CHANNELS], as bias, or anything
    bias,
    seq_idx,  # [B, S] integers, or anything
    borders,  # of outputs_kernel
    states,  # [programs, L / T, N, K] float32: the state before each sub-block of the chunk
    dx,
    ddt,
    dz,
    dB,  # [blocks, B, S, STATE] float32: what is to be added up, as dC
    dC,
    dA,  # [B, CHANNELS, STATE] float32: the same, as dD and dbias
    dD,  # [B, CHANNELS] float32, as dbias
    dbias,
    dinitial,  # [B, CHANNELS, STATE], or anything
    dout_batch,
    dout_token,
    x_batch,
    x_token,
    dt_batch,
    dt_token,
    z_batch,
    z_token,
    b_batch,
    b_token,
    c_batch,
    c_token,
    seq_batch,
    seq_token,
    length,
    chunks,
    channels,
    blocks,
    rows,
    HAS_FINAL: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    STATE: tl.constexpr,
    L: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    channel_K, column_N = block * K + tl.arange(0, K), tl.arange(0, N)
    is_channel_K, is_column_N = channel_K < channels, column_N < STATE
    inside_NK = is_column_N[:, None] & is_channel_K[None, :]
    by_state_NK = channel_K[None, :].to(tl.int64) * STATE + column_N[:, None]
    by_channel_NK = column_N[:, None].to(tl.int64) * channels + channel_K[None, :]
    A_NK = tl.load(A + by_state_NK, mask=inside_NK, other=0.0).to(tl.float32) * _LOG2_E
    D_K = tl.load(D + channel_K, mask=is_channel_K & HAS_D, other=0.0).to(tl.float32)
    bias_K = tl.load(bias + channel_K, mask=is_channel_K & HAS_BIAS, other=0.0).to(tl.float32)
    dout += row * dout_batch
    x += row * x_batch
    dt += row * dt_batch
    z += row * z_batch
    B += row * b_batch
    C += row * c_batch
    seq_idx += row * seq_batch
    dx += row * length * channels
    ddt += row * length * channels
    dz += row * length * channels
    dB += (block.to(tl.int64) * rows + row) * length * STATE
    dC += (block.to(tl.int64) * rows + row) * length * STATE
    own = row * channels * STATE
    states += tl.program_id(0).to(tl.int64) * (L // T * N * K)
    place_NK = column_N[:, None] * K + tl.arange(0, K)[None, :]
    if HAS_FINAL:
        dstate_NK = tl.load(dfinal + own + by_state_NK, mask=inside_NK, other=0.0).to(tl.float32)
    else:
        dstate_NK = tl.zeros([N, K], tl.float32)
    dA_NK = tl.zeros([N, K], tl.float32)
    dD_K = tl.zeros([K], tl.float32)
    dbias_K = tl.zeros([K], tl.float32)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        border = borders + (row * chunks + chunk) * channels * STATE
        state_NK = tl.load(border + by_channel_NK, mask=inside_NK, other=0.0)
        subs = (tl.minimum(length - chunk * L, L) + T - 1) // T
        for sub in range(0, subs):
            tl.store(states + sub * N * K + place_NK, state_NK)
            for ahead in tl.static_range(T):
                token = tl.cast(chunk * L + sub * T + ahead, tl.int64)
                is_inside = token < length
                inside_K = is_channel_K & is_inside
                step_K, _ = _step(dt + token * dt_token, channel_K, bias_K, inside_K, HAS_BIAS, SOFTPLUS)
                x_K = tl.load(x + token * x_token + channel_K, mask=inside_K, other=0.0).to(tl.float32)
                B_N = tl.load(B + token * b_token + column_N, mask=is_column_N & is_inside, other=0.0).to(tl.float32)
                if PACKED:
                    state_NK = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, state_NK)
                state_NK *= tl.exp2(step_K[None, :] * A_NK)
                state_NK += (step_K * x_K)[None, :] * B_N[:, None]
        tl.debug_barrier()
        for last in range(0, subs):
            sub = subs - 1 - last
            state_NK = tl.load(states + sub * N * K + place_NK)
            before = ()
            for ahead in tl.static_range(T):
                token = tl.cast(chunk * L + sub * T + ahead, tl.int64)
                if PACKED:
                    state_NK = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, state_NK)
                before = before + (state_NK,)  # type: ignore[assignment]  # noqa: RUF005 (Triton reads no stars)
                if ahead < T - 1:
                    is_inside = token < length
                    inside_K = is_channel_K & is_inside
                    step_K, _ = _step(dt + token * dt_token, channel_K, bias_K, inside_K, HAS_BIAS, SOFTPLUS)
                    x_K = tl.load(x + token * x_token + channel_K, mask=inside_K, other=0.0).to(tl.float32)
                    B_N = tl.load(B + token * b_token + column_N, mask=is_column_N & is_inside, other=0.0).to(
                        tl.float32
                    )
                    state_NK *= tl.exp2(step_K[None, :] * A_NK)
                    state_NK += (step_K * x_K)[None, :] * B_N[:, None]
            for behind in tl.static_range(T):
                token = tl.cast(chunk * L + sub * T + (T - 1 - behind), tl.int64)
                is_inside = token < length
                inside_K, inside_N = is_channel_K & is_inside, is_column_N & is_inside
                step_K, share_K = _step(dt + token * dt_token, channel_K, bias_K, inside_K, HAS_BIAS, SOFTPLUS)
                x_K = tl.load(x + token * x_token + channel_K, mask=inside_K, other=0.0).to(tl.float32)
                B_N = tl.load(B + token * b_token + column_N, mask=inside_N, other=0.0).to(tl.float32)
                C_N = tl.load(C + token * c_token + column_N, mask=inside_N, other=0.0).to(tl.float32)
                dout_K = tl.load(dout + token * dout_token + channel_K, mask=inside_K, other=0.0).to(tl.float32)
                decay_NK = tl.exp2(step_K[None, :] * A_NK)
                left_NK = decay_NK * before[T - 1 - behind]
                state_NK = left_NK + (step_K * x_K)[None, :] * B_N[:, None]
                if HAS_Z:
                    z_K = tl.load(z + token * z_token + channel_K, mask=inside_K, other=0.0).to(tl.float32)
                    out_K = tl.sum(state_NK * C_N[:, None], axis=0) + D_K * x_K
                    sigmoid_K = tl.sigmoid(z_K)
                    dz_K = dout_K * out_K * (sigmoid_K * (1.0 + z_K * (1.0 - sigmoid_K)))
                    tl.store(dz + token * channels + channel_K, dz_K.to(dz.dtype.element_ty), mask=inside_K)
                    dout_K *= z_K * sigmoid_K
                dC_N = tl.sum(state_NK * dout_K[None, :], axis=1)
                tl.store(dC + token * STATE + column_N, dC_N, mask=inside_N)
                dstate_NK += C_N[:, None] * dout_K[None, :]
                dB_N = tl.sum(dstate_NK * (step_K * x_K)[None, :], axis=1)
                tl.store(dB + token * STATE + column_N, dB_N, mask=inside_N)
                dwritten_K = tl.sum(dstate_NK * B_N[:, None], axis=0)
                dexponent_NK = dstate_NK * left_NK
                dA_NK += dexponent_NK * step_K[None, :]
                dstep_K = tl.sum(dexponent_NK * A_NK, axis=0) / _LOG2_E + x_K * dwritten_K
                dx_K = step_K * dwritten_K + D_K * dout_K
                tl.store(dx + token * channels + channel_K, dx_K.to(dx.dtype.element_ty), mask=inside_K)
                dstep_K = tl.where(inside_K, dstep_K * share_K, 0.0)
                tl.store(ddt + token * channels + channel_K, dstep_K.to(ddt.dtype.element_ty), mask=inside_K)
                dD_K += dout_K * x_K
                dbias_K += dstep_K
                dstate_NK *= decay_NK
                if PACKED:
                    dstate_NK = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, dstate_NK)
        tl.debug_barrier()
    tl.store(dA + own + by_state_NK, dA_NK, mask=inside_NK)
    tl.store(dD + row * channels + channel_K, dD_K, mask=is_channel_K)
    tl.store(dbias + row * channels + channel_K, dbias_K, mask=is_channel_K)
    if HAS_INITIAL:
        tl.store(dinitial + own + by_state_NK, dstate_NK.to(dinitial.dtype.element_ty), mask=inside_NK)
