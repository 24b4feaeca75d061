"""Detects the NPUs of this machine by torch_npu."""

from __future__ import annotations

from veomni_core import Hardware
from veomni_npu.torch_npu_loading import load_torch_npu


def detect() -> Hardware | None:
    """The NPUs of this machine, named as CANN names them (``Ascend910B3``); ``None`` if there are none.

    Raises:
        TorchNpuError: torch_npu is installed but can't be loaded.
    """
    torch_npu = load_torch_npu()
    count = 0 if torch_npu is None else torch_npu.npu.device_count()
    if not count:
        return None
    return Hardware("npu", name=torch_npu.npu.get_device_name(0), count=count, detected=True)
