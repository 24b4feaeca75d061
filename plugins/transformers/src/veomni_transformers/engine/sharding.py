"""How the parameters of a model's modules are sharded, and so whether a kernel may be bound there.

- ``whole``: plain tensors.
- ``fsdp2``: DTensors of ``torch.distributed.fsdp.fully_shard``, whose hooks put plain tensors in their place before the
  module's forward. A bound forward reads those.
- ``fsdp1``: parts of the flat parameter of a ``FullyShardedDataParallel``. Between forwards they are one-dimensional
  slices, empty, or views of freed memory. So they can't be inspected, and each rank holds different ones.
- ``tensor_parallel``: DTensors that stay DTensors in forward, which kernels don't take; FSDP2 over tensor parallel too.

Only the modules' structure and their tensors' types are read, never a tensor's data, so all ranks see the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.sites.walk import named_modules

WHOLE, FSDP1, FSDP2, TENSOR_PARALLEL = "whole", "fsdp1", "fsdp2", "tensor_parallel"


@dataclass(frozen=True)
class ModuleSharding:
    """``kind`` is one of the four above, and ``ranks`` the number of ranks that FSDP2 shards the parameters over.

    ``why_not`` says why no kernel is bound there, and is empty where one is.
    """

    kind: str
    why_not: str = ""
    ranks: int = 1


class ModelSharding:
    """The sharding of every module of ``model``, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gathered = set(_gathered_by_fsdp2(model))
        self._is_tensor_parallel = any(self._stays_a_dtensor(*parameter) for parameter in _parameters(model))
        self.flattened = _flattened(model)
        """Path of the first module in the model whose parameters FSDP1 flattened; ``None`` where there is none."""

    def of(self, path: str) -> ModuleSharding:
        """The sharding of the module at ``path`` with its children.

        A module without parameters has the sharding of its closest ancestor with parameters, which computes its inputs.
        """
        if self.flattened is not None:
            return ModuleSharding(FSDP1, _why_not_flattened(self.flattened))
        if not self._gathered and not self._is_tensor_parallel:
            return ModuleSharding(WHOLE)
        module = self._model.get_submodule(path)
        while path and next(_parameters(module), None) is None:
            path = path.rpartition(".")[0]
            module = self._model.get_submodule(path)
        for owner, name in _parameters(module):
            if self._stays_a_dtensor(owner, name):
                return ModuleSharding(TENSOR_PARALLEL, f"{_NOT_YET}: {_described(module, owner, name)}")
        if self._is_tensor_parallel and "forward" in vars(module):
            return ModuleSharding(TENSOR_PARALLEL, f"{_NOT_YET}: its forward was replaced for tensor parallelism")
        gathered = [
            owner._parameters[name] for owner, name in _parameters(module) if (id(owner), name) in self._gathered
        ]
        ranks: list[int] = [parameter.device_mesh.size() for parameter in gathered if _is_dtensor(parameter)]  # type: ignore[union-attr]
        return ModuleSharding(FSDP2 if gathered else WHOLE, ranks=max(ranks, default=1))

    def _stays_a_dtensor(self, owner: nn.Module, name: str) -> bool:
        return _is_dtensor(owner._parameters[name]) and (id(owner), name) not in self._gathered


_NOT_YET = "bind does not support tensor-parallel weights yet"


def _why_not_flattened(path: str) -> str:
    return (
        f"FullyShardedDataParallel has flattened the parameters of {path or 'the model'}, so what runs there can't be "
        "proven any more: call bind before the model is wrapped, or shard it with FSDP2 (fully_shard)"
    )


def _described(module: nn.Module, owner: nn.Module, name: str) -> str:
    """``its gate_proj.weight is a DTensor, Shard(dim=0) over mesh dimension tp``; the same on every rank."""
    parameter: Any = owner._parameters[name]
    path = next(path for path, child in module.named_modules() if child is owner)
    dimensions = parameter.device_mesh.mesh_dim_names or range(parameter.device_mesh.ndim)
    placements = " and ".join(
        f"{placement!r} over mesh dimension {dimension}"
        for placement, dimension in zip(parameter.placements, dimensions, strict=True)
    )
    return f"its {f'{path}.{name}'.removeprefix('.')} is a DTensor, {placements}"


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each parameter of ``module`` and its children, as the module that owns it and its name there."""
    for _, owner in named_modules(module):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name


def _is_dtensor(tensor: Any) -> bool:
    if type(tensor) is nn.Parameter or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _gathered_by_fsdp2(model: nn.Module) -> Iterator[tuple[int, str]]:
    """The parameters that FSDP2 turns into plain tensors for a forward: the id of each one's module, and its name.

    torch has no public way to tell, so FSDP2's private state is read. The parameters don't show it: one that tensor
    parallelism has sharded before, and that stays a DTensor, looks the same.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for _, module in named_modules(model):
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # before PyTorch 2.12 there was one at most
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for parameter in (parameter for group in groups for parameter in group.fsdp_params):
            if not parameter.is_dtensor:
                info = parameter._module_info
                yield id(info.module), info.param_name
                yield from zip(map(id, info.shared_modules), info.shared_param_names, strict=True)


def _flattened(model: nn.Module) -> str | None:
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel

    for path, module in named_modules(model):
        # From a model inside the wrapper the wrapper itself can't be seen, but the tensors that it leaves can.
        if isinstance(module, FullyShardedDataParallel) or any(map(_is_of_a_flat_parameter, _tensors(module))):
            return str(path)
    return None


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The module's own parameters, and the tensors that FSDP1 puts in their place under ``use_orig_params=False``."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    yield from (value for value in vars(module).values() if type(value) is Tensor)


def _is_of_a_flat_parameter(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an FSDP1 flat parameter, or stands for a part of one.

    FSDP1 marks the flat parameter and the parameters that it replaces. Its views are recognised by their base, or by
    their freed memory.
    """
    if getattr(tensor, "_fsdp_flattened", False) or getattr(tensor._base, "_fsdp_flattened", False):
        return True
    return type(tensor) is Tensor and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
