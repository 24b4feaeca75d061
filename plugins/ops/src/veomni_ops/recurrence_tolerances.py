"""How far recurrences (delta rules and scans) may be from their references, and the tensors of their results.

In low precision kernels round what they feed to matrix units: queries, keys, and corrections of a state. transformers'
own code does not; of scans it rounds the time steps. Some gradients are sums over all tokens, or all channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from veomni_ops.contract import as_tensors, tolerances

VALUES = tolerances(float32=(2e-5, 4e-6), bfloat16=(4e-2, 1e-2), float16=(6e-3, 1.5e-3))
GRADIENTS = tolerances(float32=(6e-5, 1e-5), bfloat16=(1e-1, 2e-2), float16=(1.5e-2, 3e-3))


def present(result: Any) -> tuple[Tensor, ...]:
    """The tensors of a result that may lack final states.

    Example:
        >>> import torch
        >>> present((torch.zeros(1), None))
        (tensor([0.]),)
    """
    return tuple(each for each in as_tensors(result) if each is not None)
