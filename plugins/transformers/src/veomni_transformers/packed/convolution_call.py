"""The function in place of a mixer's convolution: finds the boundaries of packed sequences, and calls the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veomni_core.sites.site import Kernel
from veomni_transformers.changes.bypassed_children import hooks_of_all


def for_packed_calls(kernel: Kernel, own: Kernel | None = None) -> Kernel:
    """``kernel`` with the signature of transformers' ``causal_conv1d_fn``, which gets all arguments of a step.

    Boundaries come from ``seq_idx``, or else from ``cu_seq_lens_q``. transformers' own function raises for the first,
    without a package that takes it, and mixes sequences for the second.

    ``own`` is the model's function, where that makes its activation at each call. It runs while there are hooks of all
    modules, which the kernel would not call; but not where there are boundaries, for the same reason.
    """

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **arguments_of_other_layers: Any,
    ) -> Any:
        if seq_idx is None and cu_seq_lens_q is not None:
            seq_idx = sequence_numbers(cu_seq_lens_q, hidden_states)
        elif own is not None and seq_idx is None and hooks_of_all():
            return own(hidden_states, weight, bias, activation=activation, **arguments_of_other_layers)
        return kernel(hidden_states, weight, bias, activation=activation, seq_idx=seq_idx)

    return causal_conv1d_fn


def for_single_tokens(kernel: Kernel, own: Kernel | None = None) -> Kernel:
    """``kernel`` with the signature of transformers' ``causal_conv1d_update``, which moves ``conv_state`` on.

    ``own`` is as in :func:`for_packed_calls`.
    """

    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        if own is not None and hooks_of_all():
            return own(hidden_states, conv_state, weight, bias, activation)
        seen = torch.cat((conv_state, hidden_states), dim=-1).to(hidden_states.dtype)
        conv_state.copy_(seen[..., -conv_state.shape[-1] :])
        return kernel(seen, weight, bias, activation=activation)[..., -hidden_states.shape[-1] :]

    return causal_conv1d_update


def sequence_numbers(boundaries: Tensor, x: Tensor, op_name: str = "causal_conv1d") -> Tensor:
    """``seq_idx`` ``[1, S]`` of the sequences that begin and end at ``boundaries``, packed in ``x`` ``[1, C, S]``.

    Args:
        boundaries: integers, 0 and then where each sequence ends.
        x: what the convolution takes. Positions past the last boundary are a sequence of their own.
        op_name: what messages call the op.

    Raises:
        ValueError: ``x`` has another batch size than one, so that it isn't known which row has the boundaries.

    Example:
        >>> sequence_numbers(torch.tensor([0, 2, 5]), torch.zeros(1, 8, 6))
        tensor([[0, 0, 1, 1, 1, 2]], dtype=torch.int32)
    """
    if x.shape[0] != 1:
        raise ValueError(
            f"{op_name}: cu_seq_lens_q gives the boundaries of one packed row, and the batch has {x.shape[0]}. "
            "Pack the batch into one row, or give seq_idx"
        )
    positions = torch.arange(x.shape[-1], device=x.device, dtype=boundaries.dtype)
    return torch.searchsorted(boundaries[1:].contiguous(), positions, right=True, out_int32=True)[None]
