"""Logits inside a graph that ``torch.compile`` traces.

A graph can't hold a tensor of which only later code decides whether it is computed. So while the model's forward is
traced, a plain object stands for ``scale * head(hidden)``. A cross entropy of it calls the kernel; any other operation
computes the real logits. The object never leaves the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from veomni_core.kernels import IGNORED
from veomni_transformers.forwards.gathered_weight import outside_of_a_graph

Kernel = Callable[..., Tensor]


class TracedLoss:
    """What became of the loss of one traced forward: ``fused``, or ``declined`` with the reason, if it is known."""

    def __init__(self) -> None:
        self.fused = False
        self.declined = ""


class TracedLogits:
    """The logits ``[..., V]`` of ``hidden[..., H]``, after a ``scale`` and, once ``capped``, a ``softcap``.

    ``head`` is the module that was called; through it FSDP2 gathers a weight that it has sharded again. ``loss``
    records whether a cross entropy of these logits called the kernel.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernel: Kernel,
        head: nn.Module | None = None,
        loss: TracedLoss | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.kernel, self._head = hidden, weight, bias, kernel, head
        self._loss = TracedLoss() if loss is None else loss
        self.scale = 1.0
        self.capped = False
        self.softcap: Any = None

    def materialize(self) -> Tensor:
        """The real logits, computed with the head's own operator."""
        logits = self._with_weight(lambda: F.linear(self.hidden, self.weight, self.bias))
        if self.capped:
            cap = 1.0 if self.softcap is None else self.softcap
            return torch.tanh(logits * (self.scale / cap)) * cap
        return logits if self.scale == 1.0 else logits * self.scale

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.hidden.dtype

    def size(self, dim: int | None = None) -> Any:
        """As :meth:`torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As :meth:`torch.Tensor.dim`."""
        return self.hidden.dim()

    def contiguous(self) -> TracedLogits:
        """Itself: there is nothing in memory yet."""
        return self

    def float(self) -> TracedLogits:
        """Itself: kernels compute the loss in float32."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself where the target is the device it is on, or float32."""
        stays = not kwargs and len(args) == 1 and args[0] in (self.device, torch.float32)
        return self if stays else self.materialize().to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        """Reshapes the positions; a shape that splits the vocabulary's dimension needs the real logits."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if sizes[-1] == self.shape[-1]:
            return self._over(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.materialize().reshape(*sizes)

    def reshape(self, *shape: Any) -> Any:
        """As :meth:`view`."""
        return self.view(*shape)

    def tanh(self) -> Any:
        """The first half of a softcap."""
        if self.capped:
            return self.materialize().tanh()
        capped = self._over(self.hidden)
        capped.capped = True
        return capped

    def __getitem__(self, index: Any) -> Any:
        if _keeps_vocabulary(index, self.dim()):
            return self._over(self.hidden[index])
        return self.materialize()[index]

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)) or (self.capped and self.softcap is not None):
            return self.materialize() * other
        result = self._over(self.hidden)
        result.scale *= other
        if self.capped:  # tanh(s z) c = c tanh(s c z / c)
            result.softcap = other
        return result

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, (int, float)) and not self.capped:
            return self * (1.0 / other)
        return self.materialize() / other

    def __add__(self, other: Any) -> Any:
        return self.materialize() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.materialize()

    def __sub__(self, other: Any) -> Any:
        return self.materialize() - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.materialize()

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.materialize()

    def __pow__(self, other: Any) -> Any:
        return self.materialize() ** other

    def __matmul__(self, other: Any) -> Any:
        return self.materialize() @ other

    def __neg__(self) -> Tensor:
        return -self.materialize()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.tanh and args and isinstance(args[0], TracedLogits):
            return args[0].tanh()
        if function is F.cross_entropy and args and isinstance(args[0], TracedLogits):
            loss = args[0]._cross_entropy(*args[1:], **(kwargs or {}))
            if loss is not None:
                return loss
        return function(*computed(args), **computed(kwargs or {}))

    def _with_weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()`` in the graph, or outside of it where FSDP2 may have sharded the weight again."""
        if isinstance(self._head, FSDPModule):
            return outside_of_a_graph(self._head, self.weight, compute)
        return compute()

    def _over(self, hidden: Tensor) -> TracedLogits:
        """The logits of other hidden states, with the same arithmetic."""
        logits = TracedLogits(hidden, self.weight, self.bias, self.kernel, self._head, self._loss)
        logits.scale, logits.capped, logits.softcap = self.scale, self.capped, self.softcap
        return logits

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORED,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Any:
        """The kernel's loss, or ``None`` for a loss that is not plain cross entropy over flat positions."""
        plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        flat = self.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
        if not plain or not flat or target.shape[0] != self.hidden.shape[0] or reduction not in ("mean", "sum"):
            return None
        if self.capped and self.softcap is None:
            return None
        self._loss.fused = True
        return self._with_weight(
            lambda: self.kernel(
                self.hidden,
                self.weight,
                target.to(self.device),
                bias=self.bias,
                ignore_index=ignore_index,
                num_items_in_batch=None if reduction == "mean" else 1,
                softcap=self.softcap,
                scale=None if self.scale == 1.0 else self.scale,
            )
        )


def _keeps_vocabulary(index: Any, dimensions: int) -> bool:
    """Whether ``index`` leaves the last of ``dimensions``, the vocabulary's, whole and in its place."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(entry is None or isinstance(entry, (bool, Tensor, list)) for entry in entries):
        return False
    ellipses = sum(entry is Ellipsis for entry in entries)
    if len(entries) - ellipses < dimensions and not (ellipses and entries[-1] is not Ellipsis):
        return True
    last = entries[-1]
    return isinstance(last, slice) and last == slice(None)


def computed(value: Any) -> Any:
    """``value`` with the real logits in place of every :class:`TracedLogits`."""
    if isinstance(value, TracedLogits):
        return value.materialize()
    if isinstance(value, (tuple, list)):
        return type(value)(computed(item) for item in value)
    if isinstance(value, dict):
        return {key: computed(item) for key, item in value.items()}
    return value
