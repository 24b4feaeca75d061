"""cross_entropy_loss as the mean of token_logprobs in a fixed order: a token's loss doesn't depend on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from veomni_core.kernels import IGNORED
from veomni_triton.token_logprobs import causal_in_fixed_order


def causal(kept_mib: int) -> Callable[..., Tensor]:
    """The kernel.

    Args:
        kept_mib: how many MiB of logits are kept from forward to backward, instead of being computed again.
    """
    logprobs_of = causal_in_fixed_order(kept_mib)

    def mean_loss(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = IGNORED,
        num_items_in_batch: int | Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Mean cross entropy of ``hidden[T, H] @ weight[V, H].T`` against the shifted ``labels[T]``, in float32.

        Divided by the number of labels, or by ``num_items_in_batch``. If every label is ignored, the loss and its
        gradients are zero. Gradients reach hidden, weight and bias.

        Raises:
            TypeError: hidden, weight and bias differ in dtype, and autocast is off.
        """
        divisor: Any = num_items_in_batch
        if divisor is None:
            divisor = (labels != ignore_index).sum().clamp_min(1)
        options = {"softcap": softcap, "scale": scale, "ignore_index": ignore_index}
        (logprobs,) = logprobs_of(hidden, weight, labels, bias, **options)
        return -logprobs.sum() / divisor

    return mean_loss
