"""The hooks that a plugin may implement. Each only returns descriptions (specs) and has no side effects."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec, VariantSpec
from veomni_core.descriptions.spec import CommandSpec, DeviceSpec, SiteRule

PROJECT = "veomni"
ENTRY_POINT_GROUP = "veomni.plugins"
PLUGIN_API_VERSIONS = range(1, 2)  # those that this core supports

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def veomni_ops() -> Iterable[OpSpec]:  # type: ignore[empty-body]
    """New ops: their variants, config field and contract."""


@hookspec
def veomni_variants() -> Iterable[VariantSpec]:  # type: ignore[empty-body]
    """Variants of ops that the core or another plugin defines, each with its contract."""


@hookspec
def veomni_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Kernels for ops of the core or of any plugin."""


@hookspec
def veomni_devices() -> Iterable[DeviceSpec]:  # type: ignore[empty-body]
    """Device types that the core does not know."""


@hookspec
def veomni_sites() -> Iterable[SiteRule]:  # type: ignore[empty-body]
    """Rules that find sites of an op in models, besides the core's own rules."""


@hookspec
def veomni_commands() -> Iterable[CommandSpec]:  # type: ignore[empty-body]
    """Subcommands for the ``veomni`` command line."""


# The type that each hook returns, in the order in which the hooks are called.
DESCRIPTIONS: dict[str, type] = {
    "veomni_ops": OpSpec,
    "veomni_variants": VariantSpec,
    "veomni_kernels": KernelSpec,
    "veomni_devices": DeviceSpec,
    "veomni_sites": SiteRule,
    "veomni_commands": CommandSpec,
}
