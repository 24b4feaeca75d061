"""A device's peak memory, which on a CPU is the resident memory, and the end of its work."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def reset_peak(device: torch.device) -> None:
    """Reset the peak, so that it doesn't include building the model; on a CPU only if the system permits it."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """The peak in bytes."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    # Not ru_maxrss: on Linux a child process inherits it, so a comparison's eager run would report its parent's peak.
    with contextlib.suppress(OSError):
        if match := _PEAK.search(_STATUS.read_text(encoding="ascii")):
            return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def wait_for(device: torch.device) -> None:
    """Return when the work that was given to ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
