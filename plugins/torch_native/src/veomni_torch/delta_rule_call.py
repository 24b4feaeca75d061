"""The call of delta rules in plain PyTorch, chunk by chunk, and token by token in a fixed order."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from veomni_ops.delta_recurrence import Bounds
from veomni_torch.delta_rule import in_chunks


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    check: Callable[..., Bounds | None],
    rule: Callable[..., tuple[Tensor, Tensor | None]] = in_chunks,
) -> tuple[Tensor, Tensor | None]:
    """The output ``[B, S, HV, V]`` in query's dtype, and the final states ``[N, HV, K, V]`` in float32 or ``None``.

    Everything between is in float32. Packed sequences don't share a chunk. Gradients of all floating-point inputs, from
    both results; autograd keeps the inputs and a state per 64 tokens.

    Raises:
        ValueError: shapes or boundaries don't fit together.
    """
    bounds = check(query, key, value, g, beta, initial_state, cu_seqlens)
    options = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, bounds)
    return rule(query, key, value, g, beta, *options)
