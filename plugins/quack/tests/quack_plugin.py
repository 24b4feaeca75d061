"""The plugin's specs, by what they compute."""

from __future__ import annotations

from veomni_core import KernelSpec
from veomni_quack.plugin import veomni_kernels

SPECS = tuple(veomni_kernels())


def spec_of(op_name: str, variant: str) -> KernelSpec:
    """The one kernel of a variant."""
    (found,) = (spec for spec in SPECS if (spec.op_name, spec.variant) == (op_name, variant))
    return found
