"""A registry of this plugin's kernels that binds them on a CPU too, where Triton's interpreter runs them."""

from __future__ import annotations

from dataclasses import replace

import torch

from veomni_core import HardwareRequirement
from veomni_core.discovery.discover import definitions
from veomni_core.discovery.registry import PluginRecord, build_registry
from veomni_triton.plugin import veomni_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def registry(anywhere: bool):
    """The plugin's kernels alone; ``anywhere`` lets the interpreter run them, which is no GPU."""
    kernels = tuple(replace(spec, hardware=HardwareRequirement()) if anywhere else spec for spec in veomni_kernels())
    record = PluginRecord("triton", "veomni-triton", "0", "veomni_triton.plugin", kernels=kernels)
    return build_registry([*definitions(), record], {})
