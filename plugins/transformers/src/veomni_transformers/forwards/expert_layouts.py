"""The layouts in which models keep their experts' weights, each with a forward that calls a kernel on them.

A layout's forward turns the module's call and weights into those of the moe_experts contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_core.sites.site import Kernel

Forward = Callable[..., Tensor]
_DROPS_CHOICES = "_veomni_drops_choices"


@dataclass(frozen=True)
class ExpertLayout:
    """``forward_with(kernel)`` is a module's forward that runs a kernel of ``variant``.

    Args:
        variant: the variant of ``moe_experts`` that a kernel must have.
        forward_with: from a kernel to the forward, a function of ``(self, hidden_states, top_k_index, top_k_weights)``.
        takes_adapters: whether the forward does nothing with ``gate_up_proj`` and ``down_proj`` but read them by name,
            transpose them, take their first experts, and pass them on. PEFT's adapters of these parameters then reach
            the kernel beside them.

    Example:
        >>> from types import SimpleNamespace
        >>> def flat(kernel):  # both projections in one parameter [E, 3I, H]
        ...     def forward(self, hidden_states, top_k_index, top_k_weights):
        ...         gate_up, down = self.weight[:, : 2 * self.width], self.weight[:, 2 * self.width :]
        ...         return kernel(hidden_states, top_k_index, top_k_weights, gate_up, down.transpose(1, 2))
        ...
        ...     return forward
        >>> LAYOUT = ExpertLayout("standard", flat)
        >>> module = SimpleNamespace(weight=torch.zeros(4, 3 * 24, 32), width=24)
        >>> shapes = lambda hidden, index, weights, gate_up, down: (tuple(gate_up.shape), tuple(down.shape))
        >>> LAYOUT.forward_with(shapes)(module, torch.zeros(5, 32), None, None)
        ((4, 48, 32), (4, 32, 24))
    """

    variant: str
    forward_with: Callable[[Kernel], Forward]
    takes_adapters: bool = False


def sizes_of(gate_up_proj: Tensor, down_proj: Tensor) -> dict[str, tuple[int, ...]]:
    """The experts' ``sizes``: ``[E, 2I, H]`` beside ``[E, H, I]``, or ``[E, H, 2I]`` beside ``[E, I, H]``."""
    experts, rows, columns = down_proj.shape
    stored = gate_up_proj.shape[1:] == (2 * columns, rows)
    hidden, intermediate = (rows, columns) if stored else (columns, rows)
    return {"experts": (experts,), "hidden": (hidden,), "intermediate": (intermediate,)}


def _as_stored(kernel: Kernel) -> Forward:
    """``gate_up_proj[E, 2I, H]`` and ``down_proj[E, H, I]``, as most families have them."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return kernel(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)

    return forward


def _transposed(kernel: Kernel) -> Forward:
    """``gate_up_proj[E, H, 2I]`` and ``down_proj[E, I, H]`` (Aria)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        return kernel(hidden_states, top_k_index, top_k_weights, gate_up, down)

    return forward


def _one_block_per_expert(kernel: Kernel) -> Forward:
    """Transposed. The input has each expert's rows in one block, already times the routing weights (Llama 4)."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        rows, experts = hidden_states.reshape(-1, hidden_states.shape[-1]), gate_up.shape[0]
        index = torch.arange(experts, device=rows.device).repeat_interleave(rows.shape[0] // experts).unsqueeze(1)
        return kernel(rows, index, torch.ones_like(index, dtype=rows.dtype), gate_up, down)

    return forward


def _with_identities(kernel: Kernel) -> Forward:
    """As stored, with further experts beyond those in ``down_proj``, which return their input unchanged (LongCat)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = self.down_proj.shape[0]
        gate_up = self.gate_up_proj[:experts]
        routed = kernel(hidden_states, top_k_index, top_k_weights, gate_up, self.down_proj)
        kept = torch.where(top_k_index < experts, 0.0, top_k_weights).sum(dim=-1, keepdim=True)
        return routed + hidden_states * kept.to(hidden_states.dtype)

    return forward


def _clamped(kernel: Kernel) -> Forward:
    """gpt-oss's gate on weights as stored, without biases (MiniMax M3)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = (self.gate_up_proj, self.down_proj, None, None)
        options = (self.swiglu_alpha, self.swiglu_limit, False)
        return kernel(hidden_states, top_k_index, top_k_weights, *weights, *options)

    return forward


def _clamped_silu(kernel: Kernel, limit: str) -> Forward:
    """SwiGLU of gate and up, clamped at the attribute ``limit``, on weights as stored (DeepSeek-V4)."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights = (self.gate_up_proj, self.down_proj, None, None)
        return kernel(hidden_states, top_k_index, top_k_weights, *weights, 1.0, getattr(self, limit), False, 0.0)

    return forward


def _clamped_interleaved(kernel: Kernel) -> Forward:
    """gpt-oss: transposed, gate and up interleaved, with biases."""

    def forward(self: Any, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        weights = (self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2))
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        return kernel(hidden_states, router_indices, routing_weights, *weights, *biases, self.alpha, self.limit, True)

    return forward


def dropping_choices(forward: Forward) -> Forward:
    """``forward``, marked as one that leaves out choices of experts which the module does not have."""
    vars(forward)[_DROPS_CHOICES] = True
    return forward


def drops_choices(forward: Forward) -> bool:
    """Whether ``forward``, a function or a method, was marked by :func:`dropping_choices`."""
    return getattr(forward, _DROPS_CHOICES, False)


LAYOUTS = {
    "as stored": ExpertLayout("standard", _as_stored, takes_adapters=True),
    "transposed": ExpertLayout("standard", _transposed, takes_adapters=True),
    "one block per expert": ExpertLayout("standard", _one_block_per_expert, takes_adapters=True),
    "with identities": ExpertLayout("standard", _with_identities, takes_adapters=True),
    "clamped": ExpertLayout("clamped", _clamped, takes_adapters=True),
    "clamped SwiGLU, limit": ExpertLayout("clamped", partial(_clamped_silu, limit="limit"), takes_adapters=True),
    "clamped SwiGLU, swiglu_limit": ExpertLayout(
        "clamped", partial(_clamped_silu, limit="swiglu_limit"), takes_adapters=True
    ),
    "clamped, interleaved": ExpertLayout("clamped", _clamped_interleaved, takes_adapters=True),
}
