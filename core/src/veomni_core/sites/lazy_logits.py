"""Logits that are computed when something looks at them: what a bound output projection gives during training.

A loss that is fused with the projection takes hidden states where plain code takes logits. So everything that
commutes with the projection (choosing, flattening and shifting positions) is done to the hidden states, a scale and a
softcap are noted, and the cross entropy is asked of the head. Anything else, and anybody after the model's forward is
over, gets the real logits, with their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEFER = "_veomni_defer_logits"


class LogitsRequest:
    """Asks a bound head for real logits, even while it defers them."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class LossRequest:
    """Asks a bound head for the cross entropy of ``hidden[T, H]`` instead of logits."""

    def __init__(
        self, hidden: Tensor, labels: Tensor, ignore_index: int, items: int | None, scale: float, softcap: float | None
    ) -> None:
        self.hidden, self.labels, self.ignore_index = hidden, labels, ignore_index
        self.items, self.scale, self.softcap = items, scale, softcap


class LazyLogits:
    """Stands for ``head(hidden)`` until its value is needed.

    What was asked of it since is noted: its value is ``scale * head(hidden)``, and once a tanh was taken (``capped``)
    ``softcap * tanh(scale / softcap * head(hidden))``, where no ``softcap`` is 1.
    """

    def __init__(self, hidden: Tensor, head: nn.Module) -> None:
        self.hidden, self.head = hidden, head
        self.scale = 1.0
        self.capped = False
        self.softcap: Any = None

    def materialize(self) -> Tensor:
        """The logits, as the head's own code computes them."""
        logits: Tensor = self.head(LogitsRequest(self.hidden) if self._deferring else self.hidden)
        if self.capped:
            cap = 1.0 if self.softcap is None else self.softcap
            return torch.tanh(logits * (self.scale / cap)) * cap
        return logits if self.scale == 1.0 else logits * self.scale

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits; needs no logits."""
        vocabulary: int = self.head.weight.shape[0]  # type: ignore[union-attr,index,assignment]
        return torch.Size((*self.hidden.shape[:-1], vocabulary))

    @property
    def device(self) -> torch.device:
        """The device of the logits; needs no logits."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits; needs no logits."""
        return self.hidden.dtype

    def size(self, dim: int | None = None) -> Any:
        """As :meth:`torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As :meth:`torch.Tensor.dim`."""
        return self.hidden.dim()

    def contiguous(self) -> Any:
        """Itself: there is nothing in memory yet."""
        return self if self._deferring else self.materialize().contiguous()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself where the target is the device it is on, or float32."""
        if self._deferring and not kwargs and len(args) == 1 and args[0] in (self.device, torch.float32):
            return self
        return self.materialize().to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        """Another shape of the positions; one that splits the vocabulary needs the logits."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if self._deferring and sizes[-1] == self.shape[-1]:
            return self._over(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.materialize().reshape(*sizes)

    def reshape(self, *shape: Any) -> Any:
        """As :meth:`view`."""
        return self.view(*shape)

    def tanh(self) -> Any:
        """The first half of a softcap."""
        if self.capped or not self._deferring:
            return self.materialize().tanh()
        capped = self._over(self.hidden)
        capped.capped = True
        return capped

    def __getitem__(self, index: Any) -> Any:
        if self._deferring and _keeps_vocabulary(index, self.dim()):
            return self._over(self.hidden[index])
        return self.materialize()[index]

    def __mul__(self, other: Any) -> Any:
        scalar = isinstance(other, (int, float)) and self._deferring
        if not scalar or (self.capped and self.softcap is not None):
            return self.materialize() * other
        result = self._over(self.hidden)
        result.scale *= other
        if self.capped:  # tanh(s z) c = c tanh(s c z / c)
            result.softcap = other
        return result

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, (int, float)) and self._deferring and not self.capped:
            return self * (1.0 / other)
        return self.materialize() / other

    def __add__(self, other: Any) -> Any:
        return self.materialize() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.materialize()

    def __sub__(self, other: Any) -> Any:
        return self.materialize() - other

    def __neg__(self) -> Tensor:
        return -self.materialize()

    def float(self) -> Any:
        """Itself: kernels compute in float32."""
        return self if self._deferring else self.materialize().float()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.tanh and isinstance(args[0], LazyLogits):
            return args[0].tanh()
        if function is F.cross_entropy and isinstance(args[0], LazyLogits):
            loss = args[0]._cross_entropy(*args[1:], **(kwargs or {}))
            if loss is not None:
                return loss
        return function(*_real(args), **_real(kwargs or {}))

    @property
    def _deferring(self) -> bool:
        """Whether the model's forward is still running; what it returns is for eyes that want logits."""
        return bool(getattr(self.head, DEFER, False))

    def _over(self, hidden: Tensor) -> LazyLogits:
        """The same of other hidden states."""
        twin = LazyLogits(hidden, self.head)
        twin.scale, twin.capped, twin.softcap = self.scale, self.capped, self.softcap
        return twin

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Any:
        """The head's fused loss, or ``None`` for a loss that is not plain cross entropy over flat positions."""
        plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        flat = self._deferring and self.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
        if not plain or not flat or reduction not in ("mean", "sum") or (self.capped and self.softcap is None):
            return None
        items = None if reduction == "mean" else 1
        return self.head(LossRequest(self.hidden, target, ignore_index, items, self.scale, self.softcap))


def _keeps_vocabulary(index: Any, dimensions: int) -> bool:
    """Whether ``index`` leaves the last of ``dimensions``, the vocabulary's, whole and in its place."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(entry is None or isinstance(entry, (bool, Tensor, list)) for entry in entries):
        return False
    if not any(entry is Ellipsis for entry in entries) and len(entries) < dimensions:
        return True
    return entries[-1] is Ellipsis or (isinstance(entries[-1], slice) and entries[-1] == slice(None))


def _real(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.materialize()
    if isinstance(value, (tuple, list)):
        return type(value)(_real(item) for item in value)
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    return value
