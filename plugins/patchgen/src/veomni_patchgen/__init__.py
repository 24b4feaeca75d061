"""Writes modeling code that people can read: a model's own code from transformers, with patches in it.

Each name is imported on first use: the plugin describes itself without libcst.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veomni_patchgen.config import External, Patch, PatchConfig, create_patch_from_external
    from veomni_patchgen.errors import PatchError
    from veomni_patchgen.generation import Generated, generate

_HOME = {
    "External": "config",
    "Generated": "generation",
    "Patch": "config",
    "PatchConfig": "config",
    "PatchError": "errors",
    "create_patch_from_external": "config",
    "generate": "generation",
}

__all__ = [
    "External",
    "Generated",
    "Patch",
    "PatchConfig",
    "PatchError",
    "create_patch_from_external",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'veomni_patchgen' has no attribute {name!r}")
    return getattr(importlib.import_module(f"veomni_patchgen.{_HOME[name]}"), name)
