"""Waits for a device."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return when the work that was given to ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
