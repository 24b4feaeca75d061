"""What a model that transformers' distributed engine has sharded is when it is whole.

The engine promises that the ranks together compute what the whole model computes. So a sharded model is proven on its
whole twin: the same code and settings, with parameters of the whole shapes on the meta device, and without the engine's
forwards. The twin shares configs, buffers and plain attributes with the model; nothing in it is run or written to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from veomni_core.changes.engine_forwards import engine_forward

_LOCAL_EXPERTS = "_is_expert_parallel"  # set where the engine made ``num_experts`` the number of a rank's experts


def whole_twin(model: nn.Module) -> nn.Module:
    """The twin of ``model``, whose modules have the same paths."""
    return _Twins().of(model)


class _Twins:
    """The twins that were made of modules and parameters: what is shared in the model is shared in its twin."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._parameters: dict[int, nn.Parameter] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._modules:
            return self._modules[id(module)]
        kind = _own_class(type(module))
        twin: nn.Module = object.__new__(kind)
        self._modules[id(module)] = twin
        vars(twin).update(vars(module))
        if engine_forward(module) is not None:
            del vars(twin)["forward"]
        for registry in ("_parameters", "_buffers", "_modules"):
            vars(twin)[registry] = dict(vars(module)[registry])
        for name, parameter in module._parameters.items():
            twin._parameters[name] = None if parameter is None else self._whole(parameter)
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else self.of(child)
        if _LOCAL_EXPERTS in vars(twin):
            del vars(twin)[_LOCAL_EXPERTS]
            vars(twin)["num_experts"] = next(each.shape[0] for each in twin._parameters.values() if each is not None)
        return twin

    def _whole(self, parameter: Any) -> nn.Parameter:
        """A parameter on the meta device with the whole shape, which a DTensor reports as its own."""
        if id(parameter) not in self._parameters:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            self._parameters[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        return self._parameters[id(parameter)]


def _own_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that FSDP2 has subclassed; ``kind`` if it has not."""
    from torch.distributed.fsdp import FSDPModule

    return kind.__bases__[-1] if FSDPModule in kind.__bases__ else kind
