"""kda: Kimi's delta attention, a gated delta rule in which each key channel of the state forgets by its own gate.

The call is that of flash-linear-attention's ``chunk_kda``, as transformers' models make it, which compute the gates
themselves. A site's ``sizes``: ``key_heads``, ``value_heads``, ``key_width`` and ``value_width``, where the model
states them. Tokens that are decoded one at a time go through the model's own recurrent function, which is not this op.

Keys or values wider than 128 are the feature ``wide_heads``: a kernel may have room for a state of 128 by 128 alone.

Shape suffixes: ``B`` batch, ``S`` sequence, ``H`` heads, ``K`` key width, ``V`` value width, ``N`` sequences.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from veomni_ops.delta_recurrence import check_inputs, over_tokens
from veomni_ops.delta_rule_samples import contract

check_call = partial(check_inputs, per_channel=True)


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

    For token ``t``, with ``S'[i] = exp(g[t, i]) * S[i]`` for each key channel ``i``, the new state is
    ``S = S' + key[t] (x) (beta[t] * (value[t] - key[t] @ S'))``, and the output is ``scale * query[t] @ S``.

    The other arguments, and what is returned, are as for ``chunk_gated_delta_rule``.

    Args:
        g: the logarithm of the decay of each key channel ``[B, S, HV, K]``, at most 0, mostly in float32.

    Raises:
        ValueError: shapes or boundaries don't fit together (:func:`check_call`).

    Example:
        >>> import torch
        >>> key = torch.eye(2).view(1, 2, 1, 2)  # the second token reads what the first has not written
        >>> value, g = torch.ones(1, 2, 1, 1), torch.tensor([[0.5, 0.25]]).log().expand(1, 2, 1, 2)
        >>> output, state = standard(key, key, value, g, torch.ones(1, 2, 1), scale=1.0, output_final_state=True)
        >>> output.flatten(), state.flatten()  # the first channel has decayed by 0.5 since
        (tensor([1., 1.]), tensor([0.5000, 1.0000]))
    """
    bounds = check_call(query, key, value, g, beta, initial_state, cu_seqlens)
    inputs = (query, key, value, g, beta)
    output, finals = over_tokens(*inputs, scale, initial_state, use_qk_l2norm_in_kernel, bounds)
    return output, finals if output_final_state else None


CONTRACTS = {"standard": contract("kda", standard, per_channel=True)}
