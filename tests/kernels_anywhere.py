"""A registry of some plugins' kernels that binds them on a CPU too, where Triton's interpreter runs them."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch

from veomni_conformance.given_kernels import definitions
from veomni_core import HardwareRequirement
from veomni_core.discovery.registry import PluginRecord, build_registry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def registry(*plugins: ModuleType, anywhere: bool):
    """The plugins' kernels alone; ``anywhere`` lets the interpreter run them, which is no GPU."""
    records = []
    for plugin in plugins:
        kernels = plugin.veomni_kernels()
        if anywhere:
            kernels = [replace(spec, hardware=HardwareRequirement()) for spec in kernels]
        name = plugin.__name__.partition(".")[0].replace("_", "-")
        records.append(PluginRecord(name, name, "0", plugin.__name__, kernels=tuple(kernels)))
    return build_registry([*definitions(), *records], {})
