"""What a bound mixer of Mamba calls in place of its model's scan, and in place of its fused step in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from veomni_ops.mamba2_scan import UNLIMITED
from veomni_transformers.packed.convolution_call import sequence_numbers


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a mixer's fused step gives where there is no package for it: the mixer then takes its steps one by one."""


def scan_call(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the arguments of the models' own scan, which calls ``kernel`` with those that the op has.

    A model's chunk size changes no result, so it is dropped. So are the arguments that a model passes on unread, such
    as those for attention kernels. Boundaries come from ``seq_idx``, or else from ``cu_seq_lens_q``.

    Raises:
        ValueError: in a call, with a gate ``z``, which transformers' own functions don't read; with ``cu_seqlens``,
            by which models don't pass boundaries; or if ``cu_seq_lens_q`` comes with a batch of several rows.
    """

    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] = UNLIMITED,
        return_final_states: bool = False,
        z: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **passed_on: Any,
    ) -> Any:
        if z is not None:
            raise ValueError("mamba2_scan: a gate z was given; gate the output after the scan")
        if cu_seqlens is not None:
            raise ValueError("mamba2_scan: cu_seqlens was given; pass boundaries as cu_seq_lens_q or seq_idx")
        if seq_idx is None and cu_seq_lens_q is not None:
            seq_idx = sequence_numbers(cu_seq_lens_q, dt.transpose(1, 2), "mamba2_scan")
        output, final = kernel(
            hidden_states,
            dt,
            A,
            B,
            C,
            D=D,
            dt_bias=dt_bias,
            initial_states=initial_states,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
            seq_idx=seq_idx,
        )
        return (output, final) if return_final_states else output

    return mamba2_chunk_scan


def selective_scan_call(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`scan_call` for the scan of Mamba 1.

    Which of its own ways to compute it a model asks for changes no result, and is dropped like other arguments unread.

    Raises:
        ValueError: in a call, with ``cu_seqlens``, by which models don't pass boundaries; or if
            ``cu_seq_lens_q`` comes with a batch of several rows.
    """

    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **passed_on: Any,
    ) -> Any:
        if cu_seqlens is not None:
            raise ValueError("selective_scan: cu_seqlens was given; pass boundaries as cu_seq_lens_q or seq_idx")
        if seq_idx is None and cu_seq_lens_q is not None:
            seq_idx = sequence_numbers(cu_seq_lens_q, dt, "selective_scan")
        output, final = kernel(
            hidden_states,
            dt,
            A,
            B,
            C,
            D=D,
            z=z,
            dt_bias=delta_bias,
            dt_softplus=delta_softplus,
            return_final_states=return_last_state,
            seq_idx=seq_idx,
        )
        return (output, final) if return_last_state else output

    return mamba_selective_scan
