"""The forwards of bound norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from veomni_core.sites.site import Kernel

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


def gated(kernel: Kernel, eps: float, group_size: int | None) -> Any:
    """For a norm with a weight that multiplies its result with a gate."""

    def forward(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return kernel(hidden_states, gate, self.weight, +eps, group_size)

    return forward
