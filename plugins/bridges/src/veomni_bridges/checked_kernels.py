"""Kernels for libraries whose modules they are not compared with: each first passes its op's contract here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from veomni_conformance import check_kernel
from veomni_core import KernelSpec, Registry, discover
from veomni_core.commands import AUTO
from veomni_core.errors import KernelUnavailableError

Kernel = Callable[..., Any]


@cache
def registry() -> Registry:
    """The plugins that are installed."""
    return discover()


def chosen(op: str, variant: str, name: str) -> KernelSpec:
    """The kernel of this name; for ``auto`` the one of the highest preference that can train here.

    Raises:
        UnknownNameError: there is no kernel of that name.
        KernelUnavailableError: ``auto`` finds none.
    """
    if name != AUTO:
        return registry().resolve(op, variant, name)
    hardware = registry().detect_hardware()
    usable = [spec for spec in registry().list_available(op, variant, hardware) if spec.backward and spec.preference]
    if not usable:
        where = hardware.describe()
        raise KernelUnavailableError(f"no kernel of {op}/{variant} can train on {where}: install a plugin that has one")
    return max(usable, key=lambda spec: spec.preference)


@cache
def checked(spec: KernelSpec) -> Kernel:
    """The kernel, once it has passed its contract on this machine's device in each of its dtypes.

    Raises:
        KernelUnavailableError: this machine doesn't meet what the kernel needs.
        ConformanceError: the kernel breaks its contract here, in values or gradients.
    """
    hardware = registry().detect_hardware()
    if reasons := spec.hardware.unmet(hardware):
        raise KernelUnavailableError(f"{spec} can't run here: {'; '.join(reasons)}")
    op = registry().op(spec.op_name)
    for dtype in spec.dtypes:
        check_kernel(spec, hardware.torch_device_type, dtype, op=op, every_form=False).raise_if_failed()
    return spec.load()
