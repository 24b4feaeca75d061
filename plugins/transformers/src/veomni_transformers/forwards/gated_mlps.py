"""The forward of a bound gated MLP. It calls the linears as modules: LoRA and quantised linears keep working."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from veomni_core.sites.site import Kernel

# The names of the linears (gate, up, down), or (packed, down) where packed's first half is the gate.
Layout = tuple[str, ...]
Modules = dict[str, Any]


def over_linears(kernel: Kernel, layout: Layout) -> Any:
    """``down(kernel(gate(x), up(x)))`` over the linears that ``layout`` names."""

    def separate(self: nn.Module, x: Tensor) -> Tensor:
        modules: Modules = self._modules
        gate, up, down = layout
        return modules[down](kernel(modules[gate](x), modules[up](x)))

    def packed(self: nn.Module, x: Tensor) -> Tensor:
        modules: Modules = self._modules
        both, down = layout
        gate, up = modules[both](x).chunk(2, dim=-1)
        return modules[down](kernel(gate, up))

    return separate if len(layout) == 3 else packed
