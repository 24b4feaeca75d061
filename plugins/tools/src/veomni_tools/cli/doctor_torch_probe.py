"""Imports torch in this process and prints what it says of itself and of the machine. Run by ``veomni doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from veomni_core.descriptions.hardware import Hardware

_AMD_DRIVER = Path("/sys/module/amdgpu/version")


def probe() -> dict[str, object]:
    """Torch's version, the CUDA or ROCm that it was built for, the GPU driver's version, and the hardware it sees."""
    import torch
    from torch.utils import collect_env

    nvidia: str | None = collect_env.get_nvidia_driver_version(collect_env.run)
    amd = _AMD_DRIVER.read_text().strip() if _AMD_DRIVER.exists() else None
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": nvidia or amd,
        "hardware": asdict(Hardware.detect()),
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
