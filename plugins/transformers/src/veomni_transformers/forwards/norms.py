"""The forwards of bound norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from veomni_core.sites.site import Kernel
from veomni_transformers.changes.bypassed_children import hooks_of_all

# Why `+eps` in the forwards below: with `torch.compile(dynamic=True)` a float from the closure becomes a graph input,
# and PyTorch 2.13 fails if two autograd.Functions are given the same one. `+eps` is a new number in each call.


def weighted(kernel: Kernel, eps: float) -> Any:
    """For a norm with a weight."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, self.weight, +eps)

    return forward


def unweighted(kernel: Kernel, eps: float) -> Any:
    """For a norm without one."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return kernel(hidden_states, None, +eps)

    return forward


def gated(kernel: Kernel, eps: float, group_size: int | None, own: Any = None) -> Any:
    """For a norm with a weight that multiplies its result with a gate.

    ``own`` is its own forward, where that makes the gate's activation at each call. It runs while there are hooks of
    all modules, which the kernel would not call.
    """

    def forward(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        if own is not None and hooks_of_all():
            return own(self, hidden_states, gate)  # type: ignore[no-any-return]
        return kernel(hidden_states, gate, self.weight, +eps, group_size)

    return forward
