"""Forward and backward: programs that walk over the tokens of one row of the batch with a few neighbouring channels.

The state is in registers, ``[N, I]``. Channels lie together in memory. A sub-block of a chunk is as many tokens as the
registers hold states of: backward walks through it forward and then back. Where a chunk begins forward has saved the
state, and where a sub-block begins backward writes it down first, which stays in the GPU's cache.

Shape legend: ``I`` channels of a program, ``N`` columns of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from veomni_triton.softplus import softplus

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Triton compiles a kernel anew for numbers that are 1 or multiples of 16. That pays for the strides of tokens alone.
NOT_SPECIALIZED = ("length", "chunks", "blocks", "seq_batch", "seq_token")


@triton.jit
def _step(dt, token, stride, bias_I, inside_I, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr):
    """The time steps of a token, and their derivative by ``dt``."""
    step_I = tl.load(dt + token * stride, mask=inside_I, other=0.0).to(tl.float32)
    if HAS_BIAS:
        step_I += bias_I
    if SOFTPLUS:
        step_I, share_I = softplus(step_I)
    else:
        share_I = tl.full(step_I.shape, 1.0, tl.float32)
    return tl.where(inside_I, step_I, 0.0), share_I


@triton.jit
def _is_first(seq_idx, token, length, seq_token):
    """Whether a packed sequence begins at ``token``, which is not the first of its row."""
    compared = (token > 0) & (token < length)
    own = tl.load(seq_idx + token * seq_token, mask=compared, other=0)
    return own != tl.load(seq_idx + (token - 1) * seq_token, mask=compared, other=0)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
    I: tl.constexpr,
    N: tl.constexpr,
):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    channel_I, column_N = block * I + tl.arange(0, I), tl.arange(0, N)
    is_channel_I, is_column_N = channel_I < channels, column_N < STATE
    inside_NI = is_column_N[:, None] & is_channel_I[None, :]
    by_state_NI = channel_I[None, :].to(tl.int64) * STATE + column_N[:, None]
    by_channel_NI = column_N[:, None].to(tl.int64) * channels + channel_I[None, :]
    A_NI = tl.load(A + by_state_NI, mask=inside_NI, other=0.0).to(tl.float32) * _LOG2_E
    D_I = tl.load(D + channel_I, mask=is_channel_I & HAS_D, other=0.0).to(tl.float32)
    bias_I = tl.load(bias + channel_I, mask=is_channel_I & HAS_BIAS, other=0.0).to(tl.float32)
    x += row * x_batch + channel_I
    dt += row * dt_batch + channel_I
    z += row * z_batch + channel_I
    B += row * b_batch + column_N
    C += row * c_batch + column_N
    seq_idx += row * seq_batch
    out += row * length * channels + channel_I
    own = row * channels * STATE
    if HAS_INITIAL:
        state_NI = tl.load(initial + own + by_state_NI, mask=inside_NI, other=0.0).to(tl.float32)
    else:
        state_NI = tl.zeros([N, I], tl.float32)
    for chunk in range(0, chunks):
        if HAS_BORDERS:
            border = borders + (row * chunks + chunk) * channels * STATE
            tl.store(border + by_channel_NI, state_NI, mask=inside_NI)
        for first in range(chunk * L, tl.minimum(chunk * L + L, length), T):
            for ahead in tl.static_range(T):
                token = tl.cast(first + ahead, tl.int64)
                is_inside = token < length
                inside_I = is_channel_I & is_inside
                step_I, _ = _step(dt, token, dt_token, bias_I, inside_I, HAS_BIAS, SOFTPLUS)
                x_I = tl.load(x + token * x_token, mask=inside_I, other=0.0).to(tl.float32)
                B_N = tl.load(B + token * b_token, mask=is_column_N & is_inside, other=0.0).to(tl.float32)
                C_N = tl.load(C + token * c_token, mask=is_column_N & is_inside, other=0.0).to(tl.float32)
                if PACKED:
                    state_NI = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, state_NI)
                state_NI *= tl.exp2(step_I[None, :] * A_NI)
                state_NI += (step_I * x_I)[None, :] * B_N[:, None]
                out_I = tl.sum(state_NI * C_N[:, None], axis=0) + D_I * x_I
                if HAS_Z:
                    z_I = tl.load(z + token * z_token, mask=inside_I, other=0.0).to(tl.float32)
                    out_I *= z_I * tl.sigmoid(z_I)
                tl.store(out + token * channels, out_I, mask=inside_I)
    if HAS_FINAL:
        tl.store(final + own + by_state_NI, state_NI, mask=inside_NI)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
    states,  # [programs, L / T, N, I] float32: the state before each sub-block of the chunk
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
    I: tl.constexpr,
    N: tl.constexpr,
):
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    channel_I, column_N = block * I + tl.arange(0, I), tl.arange(0, N)
    is_channel_I, is_column_N = channel_I < channels, column_N < STATE
    inside_NI = is_column_N[:, None] & is_channel_I[None, :]
    by_state_NI = channel_I[None, :].to(tl.int64) * STATE + column_N[:, None]
    by_channel_NI = column_N[:, None].to(tl.int64) * channels + channel_I[None, :]
    A_NI = tl.load(A + by_state_NI, mask=inside_NI, other=0.0).to(tl.float32) * _LOG2_E
    D_I = tl.load(D + channel_I, mask=is_channel_I & HAS_D, other=0.0).to(tl.float32)
    bias_I = tl.load(bias + channel_I, mask=is_channel_I & HAS_BIAS, other=0.0).to(tl.float32)
    dout += row * dout_batch + channel_I
    x += row * x_batch + channel_I
    dt += row * dt_batch + channel_I
    z += row * z_batch + channel_I
    B += row * b_batch + column_N
    C += row * c_batch + column_N
    seq_idx += row * seq_batch
    written = row * length * channels + channel_I
    summed = (block.to(tl.int64) * rows + row) * length * STATE + column_N
    own = row * channels * STATE
    states += tl.program_id(0).to(tl.int64) * (L // T * N * I)
    place_NI = column_N[:, None] * I + tl.arange(0, I)[None, :]
    if HAS_FINAL:
        dstate_NI = tl.load(dfinal + own + by_state_NI, mask=inside_NI, other=0.0).to(tl.float32)
    else:
        dstate_NI = tl.zeros([N, I], tl.float32)
    dA_NI = tl.zeros([N, I], tl.float32)
    dD_I = tl.zeros([I], tl.float32)
    dbias_I = tl.zeros([I], tl.float32)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        border = borders + (row * chunks + chunk) * channels * STATE
        state_NI = tl.load(border + by_channel_NI, mask=inside_NI, other=0.0)
        subs = (tl.minimum(length - chunk * L, L) + T - 1) // T
        for sub in range(0, subs):
            tl.store(states + sub * N * I + place_NI, state_NI)
            for ahead in tl.static_range(T):
                token = tl.cast(chunk * L + sub * T + ahead, tl.int64)
                is_inside = token < length
                inside_I = is_channel_I & is_inside
                step_I, _ = _step(dt, token, dt_token, bias_I, inside_I, HAS_BIAS, SOFTPLUS)
                x_I = tl.load(x + token * x_token, mask=inside_I, other=0.0).to(tl.float32)
                B_N = tl.load(B + token * b_token, mask=is_column_N & is_inside, other=0.0).to(tl.float32)
                if PACKED:
                    state_NI = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, state_NI)
                state_NI *= tl.exp2(step_I[None, :] * A_NI)
                state_NI += (step_I * x_I)[None, :] * B_N[:, None]
        tl.debug_barrier()
        for last in range(0, subs):
            sub = subs - 1 - last
            state_NI = tl.load(states + sub * N * I + place_NI)
            before = ()
            for ahead in tl.static_range(T):
                token = tl.cast(chunk * L + sub * T + ahead, tl.int64)
                if PACKED:
                    state_NI = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, state_NI)
                before = before + (state_NI,)
                if ahead < T - 1:
                    is_inside = token < length
                    inside_I = is_channel_I & is_inside
                    step_I, _ = _step(dt, token, dt_token, bias_I, inside_I, HAS_BIAS, SOFTPLUS)
                    x_I = tl.load(x + token * x_token, mask=inside_I, other=0.0).to(tl.float32)
                    B_N = tl.load(B + token * b_token, mask=is_column_N & is_inside, other=0.0).to(tl.float32)
                    state_NI *= tl.exp2(step_I[None, :] * A_NI)
                    state_NI += (step_I * x_I)[None, :] * B_N[:, None]
            for behind in tl.static_range(T):
                token = tl.cast(chunk * L + sub * T + (T - 1 - behind), tl.int64)
                is_inside = token < length
                inside_I, inside_N = is_channel_I & is_inside, is_column_N & is_inside
                step_I, share_I = _step(dt, token, dt_token, bias_I, inside_I, HAS_BIAS, SOFTPLUS)
                x_I = tl.load(x + token * x_token, mask=inside_I, other=0.0).to(tl.float32)
                B_N = tl.load(B + token * b_token, mask=inside_N, other=0.0).to(tl.float32)
                C_N = tl.load(C + token * c_token, mask=inside_N, other=0.0).to(tl.float32)
                dout_I = tl.load(dout + token * dout_token, mask=inside_I, other=0.0).to(tl.float32)
                decay_NI = tl.exp2(step_I[None, :] * A_NI)
                left_NI = decay_NI * before[T - 1 - behind]
                state_NI = left_NI + (step_I * x_I)[None, :] * B_N[:, None]
                if HAS_Z:
                    z_I = tl.load(z + token * z_token, mask=inside_I, other=0.0).to(tl.float32)
                    out_I = tl.sum(state_NI * C_N[:, None], axis=0) + D_I * x_I
                    sigmoid_I = tl.sigmoid(z_I)
                    dz_I = dout_I * out_I * (sigmoid_I * (1.0 + z_I * (1.0 - sigmoid_I)))
                    tl.store(dz + written + token * channels, dz_I.to(dz.dtype.element_ty), mask=inside_I)
                    dout_I *= z_I * sigmoid_I
                dC_N = tl.sum(state_NI * dout_I[None, :], axis=1)
                tl.store(dC + summed + token * STATE, dC_N, mask=inside_N)
                dstate_NI += C_N[:, None] * dout_I[None, :]
                dB_N = tl.sum(dstate_NI * (step_I * x_I)[None, :], axis=1)
                tl.store(dB + summed + token * STATE, dB_N, mask=inside_N)
                dwritten_I = tl.sum(dstate_NI * B_N[:, None], axis=0)
                dexponent_NI = dstate_NI * left_NI
                dA_NI += dexponent_NI * step_I[None, :]
                dstep_I = tl.sum(dexponent_NI * A_NI, axis=0) / _LOG2_E + x_I * dwritten_I
                dx_I = step_I * dwritten_I + D_I * dout_I
                tl.store(dx + written + token * channels, dx_I.to(dx.dtype.element_ty), mask=inside_I)
                dstep_I = tl.where(inside_I, dstep_I * share_I, 0.0)
                tl.store(ddt + written + token * channels, dstep_I.to(ddt.dtype.element_ty), mask=inside_I)
                dD_I += dout_I * x_I
                dbias_I += dstep_I
                dstate_NI *= decay_NI
                if PACKED:
                    dstate_NI = tl.where(_is_first(seq_idx, token, length, seq_token), 0.0, dstate_NI)
        tl.debug_barrier()
    tl.store(dA + own + by_state_NI, dA_NI, mask=inside_NI)
    tl.store(dD + row * channels + channel_I, dD_I, mask=is_channel_I)
    tl.store(dbias + row * channels + channel_I, dbias_I, mask=is_channel_I)
    if HAS_INITIAL:
        tl.store(dinitial + own + by_state_NI, dstate_NI.to(dinitial.dtype.element_ty), mask=inside_NI)
