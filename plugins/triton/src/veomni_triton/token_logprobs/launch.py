"""How the kernels are launched on one tile of logits ``[N, W]``."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from veomni_ops.sizes import ceil_div
from veomni_ops.token_logprobs import ENTROPY, LOG_SUM_SQUARES, MEAN_LOGIT, TOP1
from veomni_triton.token_logprobs.kernels import gradients_kernel, sums_in_fixed_order_kernel, sums_kernel
from veomni_triton.token_logprobs.tiles import COLUMNS

NUM_WARPS = 4  # 16 words for each thread

# temperature, scale and softcap; a softcap of 0 stands for none
Numbers = tuple[float, float, float]


def add_to_sums(
    logits: Tensor,
    first_word: int,
    labels: Tensor,
    temperatures: Tensor | None,
    numbers: Numbers,
    outputs: Collection[str],
    sums: Tensor,
    in_fixed_order: bool,
) -> None:
    """Fold a tile, whose words begin with ``first_word``, into ``sums[SUMS, N]``, as far as ``outputs`` need them."""
    tokens, words = logits.shape
    if not tokens:
        return
    kernel = sums_in_fixed_order_kernel if in_fixed_order else sums_kernel
    with torch.cuda.device_of(logits):
        kernel[tokens,](
            logits,
            labels,
            temperatures,
            sums,
            *numbers,
            tokens,
            words,
            first_word,
            CAPPED=numbers[-1] > 0,
            WITH_ENTROPY=ENTROPY in outputs,
            WITH_SQUARES=LOG_SUM_SQUARES in outputs,
            WITH_MEAN=MEAN_LOGIT in outputs,
            WITH_TOP1=TOP1 in outputs,
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )


def write_gradient(
    dlogits: Tensor,
    logits: Tensor,
    first_word: int,
    labels: Tensor,
    temperatures: Tensor | None,
    numbers: Numbers,
    log_normalizer: Tensor,
    entropy: Tensor | None,
    dlogprobs: Tensor | None,
    dentropy: Tensor | None,
) -> None:
    """Write the gradient of a tile's logits into ``dlogits``, which may be ``logits`` itself.

    ``entropy`` is given with ``dentropy``.
    """
    tokens, words = logits.shape
    if not tokens:
        return
    with torch.cuda.device_of(logits):
        gradients_kernel[tokens, ceil_div(words, COLUMNS)](
            logits,
            dlogits,
            labels,
            temperatures,
            log_normalizer,
            entropy,
            dlogprobs,
            dentropy,
            *numbers,
            words,
            first_word,
            CAPPED=numbers[-1] > 0,
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )
