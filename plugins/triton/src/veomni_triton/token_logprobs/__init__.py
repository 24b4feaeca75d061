"""token_logprobs: tiles of logits from PyTorch's matrix product, and one pass of a Triton kernel over each.

Forward folds each tile into sums of its tokens. Backward needs the logits again, since the upstream gradients of the
tokens are not known before. The last tiles are kept for it, up to a number of bytes; the others are computed anew, each
in the place of the one before. A tile has all tokens, so the gradient of its words is one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from veomni_core.kernels import IGNORED, first_derivatives_only, product_operands, without_autocast
from veomni_ops.token_logprobs import ENTROPY, LOGPROBS, check_options
from veomni_triton.token_logprobs.operators import token_logprobs_forward, token_logprobs_gradients


def causal(kept_mib: int) -> Callable[..., tuple[Tensor, ...]]:
    """The kernel.

    Args:
        kept_mib: how many MiB of logits are kept from forward to backward, instead of being computed again.
    """
    return partial(token_logprobs, kept_bytes=kept_mib << 20)


def causal_in_fixed_order(kept_mib: int) -> Callable[..., tuple[Tensor, ...]]:
    """:func:`causal` with products whose tiles sum along the whole width: no result depends on the other tokens."""
    return partial(causal(kept_mib), in_fixed_order=True)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = IGNORED,
    outputs: tuple[str, ...] = (LOGPROBS,),
    *,
    kept_bytes: int,
    in_fixed_order: bool = False,
) -> tuple[Tensor, ...]:
    """Statistics of the words' distribution for each of ``hidden[N, H]``, as float32 ``[N]``; all five outputs.

    Logits are computed in the dtype of hidden and weight, or in autocast's, and the arithmetic after them in float32.
    ``logprobs`` and ``entropy`` have gradients of hidden, weight and bias.

    Raises:
        ValueError: an output is unknown, or the temperature not above 0.
        TypeError: hidden, weight and bias differ in dtype, and autocast is off.
    """
    check_options(outputs, temperature, labels)
    hidden, weight, bias = product_operands("triton", hidden=hidden, weight=weight, bias=bias)
    # Not for a forward without gradients: nothing would read them.
    learns = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (hidden, weight, bias))
    temperatures, number = (
        (temperature.float().contiguous(), 1.0) if isinstance(temperature, Tensor) else (None, temperature)
    )
    return _TokenLogprobs.apply(  # type: ignore[no-any-return]
        hidden,
        weight,
        bias,
        labels,
        temperatures,
        (number, 1.0 if scale is None else scale, softcap or 0.0),
        ignore_index,
        in_fixed_order,
        outputs,
        kept_bytes if learns else 0,
    )


class _TokenLogprobs(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperatures: Tensor | None,
        numbers: tuple[float, float, float],  # temperature, scale, softcap; a softcap of 0 stands for none
        ignore_index: int,
        in_fixed_order: bool,
        outputs: tuple[str, ...],
        kept_bytes: int,
    ) -> tuple[Tensor, ...]:
        results, log_normalizer, entropy, kept = token_logprobs_forward(
            hidden,
            weight,
            bias,
            labels,
            temperatures,
            *numbers,
            ignore_index,
            in_fixed_order,
            list(outputs),
            kept_bytes,
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, temperatures, log_normalizer, entropy, kept)
        ctx.numbers, ctx.how, ctx.outputs = numbers, (ignore_index, in_fixed_order), outputs
        ctx.mark_non_differentiable(
            *(result for name, result in zip(outputs, results, strict=True) if name not in (LOGPROBS, ENTROPY))
        )
        return tuple(results)

    @staticmethod
    @first_derivatives_only
    @without_autocast
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        given = dict(zip(ctx.outputs, upstream, strict=True))
        dlogprobs, dentropy = given.get(LOGPROBS), given.get(ENTROPY)
        if dlogprobs is None and dentropy is None:
            return (None,) * 10
        gradients = iter(
            token_logprobs_gradients(
                dlogprobs, dentropy, *ctx.saved_tensors, *ctx.numbers, *ctx.how, list(ctx.needs_input_grad[:3])
            )
        )
        return *(next(gradients) if wanted else None for wanted in ctx.needs_input_grad[:3]), *(None,) * 7
