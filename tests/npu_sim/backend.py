"""The device type ``npu``: PyTorch's PrivateUse1 under that name, by PyTorch's support for backends in Python.

Tensors are true tensors of the device (``tensor.device.type == "npu"``, autograd and optimizers included). Their
memory is the host's, and what PyTorch itself computes is computed by the CPU, so times and rounding are the CPU's.
"""

from __future__ import annotations

import functools
import types

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from npu_sim import dispatch

# What torch_npu calls the first product that the plugin names; see _get_device_properties in torch_npu.npu.utils.
PRODUCT = "Ascend910B3"


class NpuModule(types.ModuleType):
    """``torch.npu`` with what PyTorch and transformers ask of it. ``present`` says whether the simulation is on."""

    def __init__(self) -> None:
        super().__init__("torch.npu")
        self.present = False

    def is_available(self) -> bool:
        return self.present

    def is_initialized(self) -> bool:
        return self.present

    def device_count(self) -> int:
        return int(self.present)

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        """There is one device."""

    def get_device_name(self, device: object = None) -> str:
        return PRODUCT

    def synchronize(self, device: object = None) -> None:
        """Nothing runs in the background."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        """Random numbers are drawn by the CPU's generator, which has its own seed."""

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _module.present

    def has_primary_context(self, device_index: int) -> bool:
        return _module.present

    def is_built(self) -> bool:
        return True


class _DeviceGuard(torch._C._acc.DeviceGuard):
    def type_(self) -> object:
        return torch._C._autograd.DeviceType.PrivateUse1


_module = NpuModule()


@functools.cache
def start() -> NpuModule:
    """Make the device known to PyTorch. A process can do that once, and not undo it; gives ``torch.npu``."""
    _setup_privateuseone_for_python_backend("npu", _module, _Hooks(), _DeviceGuard())
    dispatch.register()
    return _module
