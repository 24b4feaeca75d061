"""Logits that are computed when something looks at them: what a bound output projection gives during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class LogitsRequest:
    """Asks a bound head for real logits, even while it defers them."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class LazyLogits:
    """Stands for ``head(hidden)`` until its value is needed.

    A loss that is fused with the projection never needs it. Anything else that touches it, a softcap, a metric, an
    index, gets the real logits, with their gradient, as if the projection had been applied at once.
    """

    def __init__(self, hidden: Tensor, head: nn.Module) -> None:
        self.hidden = hidden
        self.head = head

    def materialize(self) -> Tensor:
        """The logits, as the head's own code computes them."""
        return self.head(LogitsRequest(self.hidden))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*_real(args), **_real(kwargs or {}))

    def __getitem__(self, index: Any) -> Any:
        return self.materialize()[index]

    def __mul__(self, other: Any) -> Any:
        return self.materialize() * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.materialize()

    def __truediv__(self, other: Any) -> Any:
        return self.materialize() / other

    def __add__(self, other: Any) -> Any:
        return self.materialize() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.materialize()

    def __sub__(self, other: Any) -> Any:
        return self.materialize() - other

    def __neg__(self) -> Tensor:
        return -self.materialize()


def _real(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.materialize()
    if isinstance(value, (tuple, list)):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return value
