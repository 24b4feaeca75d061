"""Liger's own autograd functions, made to refuse what they would get wrong."""

from __future__ import annotations

import functools
from typing import Any

from veomni_core.ops.first_derivatives import first_derivatives_only


def first_derivative_of(function: Any) -> Any:
    """A subclass of an ``autograd.Function`` of Liger's that raises where a second derivative is asked for."""

    class Once(function):  # type: ignore[misc]
        @staticmethod
        @first_derivatives_only
        @functools.wraps(function.backward)
        def backward(ctx: Any, *gradients: Any) -> Any:
            return function.backward(ctx, *gradients)

    return Once
