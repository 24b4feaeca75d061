"""Describes the kernels that the file named by ``VEOMNI_HUB_KERNELS`` lists. Imports none of them."""

from __future__ import annotations

from veomni_core import CommandSpec, KernelSpec, hookimpl
from veomni_hub.kernel_file import listed

VEOMNI_PLUGIN_API_VERSION = 1


@hookimpl
def veomni_kernels() -> list[KernelSpec]:
    """A spec for each entry of the file; none where the variable is not set."""
    return [kernel.spec for kernel in listed()]


@hookimpl
def veomni_commands() -> list[CommandSpec]:
    """The command that says which build variants a folder has, and their digests."""
    return [CommandSpec("hub", "veomni_hub.command:hub", "Show a Hub kernel's build variants and their digests.")]
