"""chunk_gated_delta_rule: linear attention whose state forgets by a gate and is corrected by the delta rule.

The call is that of flash-linear-attention's function of this name, as transformers' models make it. A site's ``sizes``:
``key_heads``, ``value_heads``, ``key_width`` and ``value_width``, where the model states them. Tokens that are decoded
one at a time go through the model's own recurrent function; a batch-invariant kernel takes its place, with one token.

Keys or values wider than 128 are the feature ``wide_heads``: a kernel may have room for a state of 128 by 128 alone.

Shape suffixes: ``B`` batch, ``S`` sequence, ``H`` heads, ``K`` key width, ``V`` value width, ``N`` sequences.
"""

from __future__ import annotations

from torch import Tensor

from veomni_ops.delta_recurrence import check_inputs, over_tokens
from veomni_ops.delta_rule_samples import contract

check_call = check_inputs


def standard(
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
) -> tuple[Tensor, Tensor | None]:
    """Reads and corrects a state ``S[K, V]`` of each head, token by token, in float32.

    For token ``t``, with ``S' = exp(g[t]) * S``, the new state is
    ``S = S' + key[t] (x) (beta[t] * (value[t] - key[t] @ S'))``, and the output is ``scale * query[t] @ S``.

    Args:
        query: ``[B, S, H, K]``. Its heads may divide the value's: each then serves that many neighbouring value heads.
        key: of the query's shape.
        value: ``[B, S, HV, V]``.
        g: the logarithm of the decay ``[B, S, HV]``, at most 0, mostly in float32.
        beta: how much of the correction is written ``[B, S, HV]``, at least 0.
        scale: multiplies the query; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, the state before the first token of each sequence; zeros by default.
        output_final_state: whether the state after the last token of each sequence is returned.
        use_qk_l2norm_in_kernel: whether queries and keys are divided by ``sqrt(sum of squares + 1e-6)`` first.
        cu_seqlens: integers ``[N + 1]`` from 0 to S, where packed sequences begin and end in a batch of one. Sequences
            may be empty. Without it, N is B.

    Returns:
        The output ``[B, S, HV, V]`` in query's dtype, and the final states ``[N, HV, K, V]`` in float32, or ``None``
        (both in float64 for float64 queries). Gradients of all floating-point inputs, from both.

    Raises:
        ValueError: shapes or boundaries don't fit together (:func:`check_call`).

    Example:
        >>> import torch
        >>> one = torch.ones(1, 2, 1, 1)  # two tokens with the same key of width 1
        >>> half = torch.full((1, 2, 1), 0.5)
        >>> output, state = standard(one, one, one, g=half.log(), beta=half, scale=1.0, output_final_state=True)
        >>> output.flatten(), state.flatten()  # 0 + (1 - 0)/2, and then 1/4 + (1 - 1/4)/2
        (tensor([0.5000, 0.6250]), tensor([0.6250]))
    """
    bounds = check_call(query, key, value, g, beta, initial_state, cu_seqlens)
    inputs = (query, key, value, g.unsqueeze(-1), beta)
    output, finals = over_tokens(*inputs, scale, initial_state, use_qk_l2norm_in_kernel, bounds)
    return output, finals if output_final_state else None


CONTRACTS = {"standard": contract("chunk_gated_delta_rule", standard, per_channel=False)}
