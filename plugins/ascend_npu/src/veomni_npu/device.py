"""The device type ``npu``: what torch_npu sees of it on this machine."""

from __future__ import annotations

from veomni_core import Hardware
from veomni_npu.torch_npu_loading import load_torch_npu


def detect() -> Hardware | None:
    """The NPUs here, with the product's name as CANN spells it (``Ascend910B3``); ``None`` where there is none.

    Raises:
        TorchNpuError: torch_npu is installed and can't be loaded.
    """
    torch_npu = load_torch_npu()
    count = 0 if torch_npu is None else torch_npu.npu.device_count()
    if not count:
        return None
    return Hardware("npu", name=torch_npu.npu.get_device_name(0), count=count, detected=True)
