"""A stand-in for verl's platform of a GPU, on a CPU: verl 0.9.1 has none. It is set where it is imported."""

from __future__ import annotations

import contextlib
from typing import Any

from verl.plugin.platform import PlatformBase, set_platform


class Module:
    """What verl asks of torch.cuda."""

    is_available = staticmethod(lambda: False)
    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = staticmethod(lambda *_: 0)
    mem_get_info = staticmethod(lambda *_: (0, 0))
    empty_cache = synchronize = staticmethod(lambda *_: None)


def nothing(self: Any, *_: Any) -> None:
    return None


answers = {
    "device_name": "cpu",
    "vendor_name": "stand-in",
    "device_module": Module,
    "is_available": True,
    "current_device": "cpu",
    "device_count": 1,
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
    "ray_resource_name": "CPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
    "get_device_capability": (None, None),
    "nvtx_range": contextlib.nullcontext(),
}
made: dict[str, Any] = {}
for name in PlatformBase.__abstractmethods__:
    own = vars(PlatformBase)[name]
    answer = (lambda value: lambda self, *_: value)(answers[name]) if name in answers else nothing
    made[name] = property(answer) if isinstance(own, property) else answer
set_platform(type("PlatformCpu", (PlatformBase,), made)())
