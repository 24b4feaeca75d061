"""moe_experts: weights in ``gate_up_proj[E, 2I, H]`` with up before gate, and a kernel.

``T`` tokens, ``K`` choices per token, ``E`` experts, ``H`` hidden and ``I`` intermediate size.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from veomni_core.authoring import Kernel
from veomni_ops.moe_experts import standard
from veomni_transformers.authoring import ExpertLayout, ExpertsModules


def kernel(
    hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """The contract's own mathematics, in the place of a library's kernel."""
    return standard(hidden, top_k_index, top_k_weights, gate_up_proj, down_proj)


def _up_first(kernel: Kernel) -> Any:
    """The forward of a module with this layout, over a kernel that takes gate before up."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        up, gate = self.gate_up_proj.chunk(2, dim=1)  # [E, I, H] each
        gate_up = torch.cat((gate, up), dim=1)  # [E, 2I, H]
        return kernel(hidden_states, top_k_index, top_k_weights, gate_up, self.down_proj)  # type: ignore[no-any-return]

    return forward


class UpFirstExperts(ExpertsModules):
    """Finds experts as the core's rule does, and proves them in this layout."""

    layouts = MappingProxyType({"up before gate": ExpertLayout("standard", _up_first)})
