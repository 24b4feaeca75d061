"""For kernels whose gradient is a kernel too, which autograd can't differentiate again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Backward = Callable[..., Any]


def first_derivatives_only(backward: Backward) -> Backward:
    """Decorates the backward of an ``autograd.Function`` or an operator: asked for a second derivative, it raises.

    Autograd would take what the backward computes for constants, and give a gradient penalty without some of its terms,
    or none. torch's own ``once_differentiable`` keeps silent where saved tensors alone want a gradient.

    Raises:
        RuntimeError: in backward, where it runs with ``create_graph=True``.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{backward.__module__} computes no second derivatives, and backward was called with "
                "create_graph=True: choose eager for its op"
            )
        return backward(ctx, *gradients)

    return checked
