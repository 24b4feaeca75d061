"""The device type ``npu``: what torch_npu sees of it on this machine."""

from __future__ import annotations

from veomni_core import Hardware
from veomni_npu.torch_npu_loading import load_torch_npu


def detect() -> Hardware | None:
    """The NPUs here, with the product's name as CANN spells it (``Ascend910B3``); ``None`` where there is none.

    Raises:
        TorchNpuError: torch_npu is installed and can't be loaded.
    """
    if not load_torch_npu():
        return None
    import torch

    count = torch.npu.device_count()
    if not count:
        return None
    return Hardware("npu", name=torch.npu.get_device_name(0), count=count, detected=True)
