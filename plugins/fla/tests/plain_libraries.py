"""Plain PyTorch in the place of the libraries' functions, with their arguments, and with what they can't take.

They let the adapters be held to the contracts on any machine: boundaries, widths, layouts, empty calls. What the
libraries themselves compute is tested in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from veomni_fla import causal_conv1d as conv_adapters
from veomni_fla import delta_rules
from veomni_fla import mamba2_scan as scan_adapters
from veomni_fla import rms_norm_gated as norm_adapters
from veomni_fla.chunk_gated_delta_rule import any_call, multiple_of_16, one_tile
from veomni_fla.delta_rules import adapted, even, of_aligned_memory
from veomni_ops import causal_conv1d, chunk_gated_delta_rule, kda, mamba2_scan, rms_norm_gated

_FILLED = 32


def _delta_rule(reference, widths_taken):
    def library(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):
        assert q.numel() and v.numel(), "an empty grid can't be launched"
        assert v.shape[0] * v.shape[2] <= delta_rules.MOST_PLANES, "invalid argument"
        assert widths_taken(q.shape[-1]) and widths_taken(v.shape[-1])
        assert q.dtype == k.dtype == v.dtype in (torch.bfloat16, torch.float16)
        assert initial_state is None or initial_state.dtype == torch.float32
        if cu_seqlens is not None:
            assert cu_seqlens.dtype == torch.int32
            assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist()
        return reference(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )

    return library


def fla_delta():
    library = _delta_rule(chunk_gated_delta_rule.standard, lambda width: width % 2 == 0 and width <= 256)
    return adapted("fla", library, chunk_gated_delta_rule.check_call, even)


def _first_columns(query, key, value, g, beta, scale, initial_state, *options):
    """The recurrence on the columns that samples fill: a state of 128 by 128 takes minutes."""
    inputs, state = (query, key, value), initial_state
    assert not any(bool(x[..., _FILLED:].any()) for x in inputs)
    state = None if state is None else state[..., :_FILLED, :_FILLED]
    narrow = (x[..., :_FILLED] for x in inputs)
    output, final = chunk_gated_delta_rule.standard(*narrow, g, beta, scale, state, *options)
    missing = 128 - _FILLED
    return F.pad(output, (0, missing)), None if final is None else F.pad(final, (0, missing, 0, missing))


def _of_tilelang(library):
    """Raises for memory at an odd address, and for one head with an odd stride, as TileLang's kernels do."""

    def check(x):
        if x is not None:
            x = x.contiguous()
            assert x.data_ptr() % 16 == 0, "misaligned address"
            assert x.stride()[1:] == torch.empty(x.shape, device="meta").stride()[1:], "strides violate the ABI"

    def call(*tensors, initial_state, **options):
        for each in (*tensors, initial_state):
            check(each)
        output, state = library(*tensors, initial_state=initial_state, **options)
        results = (output,) if state is None else (output, state)
        output, *states = _Checked.apply(check, *results)
        return output, states[0] if states else None

    return call


def fla_tilelang():
    library = _delta_rule(chunk_gated_delta_rule.standard, lambda width: width % 16 == 0 and width <= 256)
    library = of_aligned_memory(_of_tilelang(library))
    return adapted("fla_tilelang", library, chunk_gated_delta_rule.check_call, multiple_of_16)


def flash_qla():
    """With FlashQLA's errors for a packed sequence without a token, and for three heads."""

    def library(q, k, v, g, beta, scale, initial_state, cu_seqlens=None, **options):
        assert q.shape[-1] == v.shape[-1] == 128 and q.dtype in (torch.bfloat16, torch.float16)
        assert v.shape[2] == 1 or v.shape[2] % 2 == 0, "no available layout found"
        assert cu_seqlens is None or bool(cu_seqlens.diff().all()), "invalid sequence lengths"
        assert g.dtype == torch.float32, "dg should be fp32"
        wanted = options["output_final_state"], options["use_qk_l2norm_in_kernel"]
        return _first_columns(q, k, v, g, beta, scale, initial_state, *wanted, cu_seqlens)

    library = any_call(of_aligned_memory(_of_tilelang(library)))
    return adapted("flash_qla", library, chunk_gated_delta_rule.check_call, one_tile)


def fla_kda():
    library = _delta_rule(kda.standard, lambda width: width % 2 == 0 and width <= 256)
    return adapted("fla", library, kda.check_call, even)


def _conv_by_boundaries(x, weight, bias, residual, initial_state, output_final_state, activation, bounds, on_host):
    assert len(x) <= conv_adapters.MOST_PLANES, "invalid argument"
    assert x.numel() and residual is initial_state is None and not output_final_state
    numbers = None
    if bounds is not None:
        assert x.shape[0] == 1 and bounds.dtype == torch.int32 and bounds.tolist() == on_host.tolist()
        numbers = causal_conv1d.numbered(bounds.diff().tolist(), x.device)
    y = causal_conv1d.standard(x.transpose(1, 2), weight, bias, activation, numbers)
    return y.transpose(1, 2).contiguous(), None


class _Checked(torch.autograd.Function):
    """Its inputs, whose incoming gradients are handed to ``check``."""

    @staticmethod
    def forward(ctx, check, *tensors):
        ctx.check = check
        return tuple(x.clone() for x in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        for each in gradients:
            ctx.check(each)
        return None, *gradients


def _conv_by_numbers(x, weight, bias=None, seq_idx=None, activation=None):
    assert x.numel() and weight.shape[1] in (2, 3, 4) and x.data_ptr() % 16 == 0
    assert bias is None or bias.dtype == weight.dtype
    channels_last = x.stride(1) == 1 and x.stride(2) > 1

    def check_layout(x):
        assert channels_last or x.is_contiguous()
        if channels_last:
            assert x.stride(1) == 1 and not any(size % 8 for size in (x.shape[1], x.stride(0), x.stride(2)))

    check_layout(x)
    if seq_idx is not None:
        assert (channels_last or x.shape[2] == 1) and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
        assert not bool((seq_idx < 0).any()), "negative numbers are padding"
    return _Checked.apply(check_layout, causal_conv1d.standard(x, weight, bias, activation, seq_idx))[0]


def fla_conv():
    return conv_adapters.by_boundaries(_conv_by_boundaries)


def package_conv():
    return conv_adapters.by_numbers(_conv_by_numbers)


def _norm(x, gate, weight, bias, activation, residual, eps, prenorm, residual_in_fp32, is_rms_norm):
    assert x.numel() and bias is residual is None and (activation, prenorm, is_rms_norm) == ("sigmoid", False, True)
    assert weight.shape == x.shape[-1:]
    return rms_norm_gated.sigmoid(x, gate, weight, eps)


def fla_norm():
    return norm_adapters.adapted(_norm)


def _scan(x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, seq_idx, dt_softplus, dt_limit, return_final_states):
    """As the package does.

    It compares numbers of two tokens wherever they stand; of initial states, those before number 0 alone count. Its
    clamp drops a NaN in a time step, and the one of its decays a NaN in ``A``.
    """
    assert x.numel() and A.dtype == torch.float32 and x.dtype == B.dtype == C.dtype
    assert all(each is None or each.stride(-1) == 1 for each in (x, B, C, D))
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and not bool(seq_idx[:, 0].any())
        assert bool((seq_idx.diff(dim=1) >= 0).all())
    assert len(dt_limit) == 2 and all(isinstance(limit, float) for limit in dt_limit)
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    dt, A = torch.where(dt.isnan(), dt_limit[0], dt), torch.where(A.isnan(), 0.0, A)
    options = (D, None, initial_states, False, dt_limit, return_final_states, seq_idx)
    output, states = mamba2_scan.standard(x, dt, A, B, C, *options)
    return (output.to(x.dtype), states) if return_final_states else output.to(x.dtype)


def mamba_ssm():
    return scan_adapters.adapted(_scan)
