"""The memory of the simulated NPU: every storage of the device is a window on host memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

DEVICE = torch.device("privateuseone", 0)  # named npu once the backend has started

# Kernels that only change a tensor's shape over the storage it has: the CPU's serve any device.
_as_strided = torch.ops.aten.as_strided.default
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset
_CPU = torch._C.DispatchKey.CPU


@dataclass(frozen=True)
class _Block:
    """Host memory that lives as long as the storage of the device that looks at it."""

    device_storage: StorageWeakRef
    host_storage: torch.UntypedStorage


class _Blocks:
    """Host memory by the address of the device's storage."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._sweep_at = 1024
        self._lock = threading.Lock()  # a block that another thread adds during a sweep must not get lost

    def add(self, device_storage: torch.UntypedStorage, host_storage: torch.UntypedStorage) -> None:
        with self._lock:
            if len(self._blocks) >= self._sweep_at:
                self._blocks = {key: block for key, block in self._blocks.items() if not block.device_storage.expired()}
                self._sweep_at = max(1024, 2 * len(self._blocks))
            self._blocks[device_storage._cdata] = _Block(StorageWeakRef(device_storage), host_storage)

    def host_storage(self, device_storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return self._blocks[device_storage._cdata].host_storage


_blocks = _Blocks()


def on_device(host: Tensor) -> Tensor:
    """A tensor of the device over the memory of ``host``, a CPU tensor."""
    return move_to(torch._C._acc.create_empty_tensor((0,), host.dtype), host)


def move_to(tensor: Tensor, host: Tensor) -> Tensor:
    """Give ``tensor``, which is on the device, the memory and the shape of ``host``."""
    host_storage = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(host_storage.data_ptr(), DEVICE, host_storage.nbytes())
    _blocks.add(storage, host_storage)
    _set_storage._op_dk(_CPU, tensor, storage, host.storage_offset(), host.size(), host.stride())
    return tensor


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of ``tensor``, which is on the device."""
    storage = _blocks.host_storage(tensor.untyped_storage())
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def view_of(tensor: Tensor, host_view: Tensor) -> Tensor:
    """The view of ``tensor``, which is on the device, that ``host_view`` is of its memory."""
    view: Tensor = _as_strided._op_dk(_CPU, tensor, host_view.size(), host_view.stride(), host_view.storage_offset())
    return view
