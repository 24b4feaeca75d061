"""The QuACK functions that the loss calls; shapes: :class:`veomni_quack.cross_entropy_loss.chunks.QuackCalls`."""

from __future__ import annotations

from quack.gemm_interface import default_config, gemm_tuned
from torch import Tensor

from veomni_quack.compiling import check_target, first_call
from veomni_quack.versions import losses_of_rows

check_target()


def losses_and_gradient(logits: Tensor, labels: Tensor, out: Tensor, ignore_index: int) -> None:
    """The cross entropy of each row; overwrites the logits with its gradient. Each row is read and written once."""
    with first_call("cross entropy and its gradient", logits.dtype, logits.shape[1]):
        losses_of_rows(logits, labels, out, ignore_index)


def add_product(dlogits: Tensor, hidden: Tensor, out: Tensor, first: bool) -> None:
    """Write (``first``) or add ``dlogits.T @ hidden`` to the float32 ``out``.

    The configuration is passed explicitly: without one, ``gemm`` would ask nvMatmulHeuristics if that is installed, and
    the choice would depend on the environment.
    """
    config = default_config(out.device)
    with first_call("weight gradient of the head", dlogits.dtype, first):
        gemm_tuned.fn(dlogits.T, hidden, out, add_to_output=not first, config=config)


def scaled_sum(dlogits: Tensor, hidden: Tensor, so_far: Tensor | None, factor: Tensor, out: Tensor) -> None:
    """``out = factor * (dlogits.T @ hidden + so_far)``; the kernel reads ``factor`` on the device."""
    # alpha scales the product and beta the sum so far; both are the same device scalar.
    scale, config = factor.float().reshape(1), default_config(out.device)
    with first_call("scaled weight gradient of the head", dlogits.dtype, so_far is not None):
        gemm_tuned.fn(dlogits.T, hidden, out, so_far, alpha=scale, beta=scale, config=config)
