"""For kernels whose backward is a kernel too: autograd can't differentiate it a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def first_derivatives_only(backward: Backward, op: str = "") -> Backward:
    """Decorates the backward of an ``autograd.Function`` or of a custom operator, so that double backward raises.

    Otherwise autograd would treat what the backward computes as constants, and the gradient of a gradient penalty would
    miss terms. torch's own ``once_differentiable`` does not raise if only saved tensors require gradients.

    Args:
        backward: ``(ctx, *gradients)``, the backward.
        op: the op that it belongs to, for the message; without it, the message has the module's name.

    Returns:
        ``backward`` with that check before it.

    Raises:
        RuntimeError: in backward, if it runs with ``create_graph=True``.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     @first_derivatives_only
        ...     def backward(ctx, gradient):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * gradient
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> torch.autograd.grad(Square.apply(x), x)
        (tensor(6.),)
        >>> torch.autograd.grad(Square.apply(x), x, create_graph=True)
        Traceback (most recent call last):
            ...
        RuntimeError: ... computes no second derivatives, and backward was called with create_graph=True: choose
        eager for its op
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{f'the kernel of {op}' if op else backward.__module__} computes no second derivatives, and backward "
                f"was called with create_graph=True: choose eager for {op or 'its op'}"
            )
        return backward(ctx, *gradients)

    return checked
