"""Declares the standard ops to veomni-core. Does not import torch."""

from __future__ import annotations

from veomni_core import OpSpec, hookimpl
from veomni_ops.catalog import OPS

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_ops() -> tuple[OpSpec, ...]:
    return OPS
