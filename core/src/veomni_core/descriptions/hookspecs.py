"""The hooks that a plugin may implement. Each only returns descriptions (specs) and has no side effects."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec, VariantSpec
from veomni_core.descriptions.spec import CommandSpec, DeviceSpec, ModelRule, ModelSpec, ModelViewSpec, SiteRule

PROJECT = "veomni"
ENTRY_POINT_GROUP = "veomni.plugins"
DEFINITIONS_GROUP = "veomni.definitions"  # plugins without kernels: VEOMNI_PLUGINS chooses among kernels, not these
PLUGIN_API_VERSIONS = range(1, 3)  # those that this core supports

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
    """Rules that find sites of an op in models."""


@hookspec
def veomni_model_rules() -> Iterable[ModelRule]:  # type: ignore[empty-body]
    """Rules that change a model besides its sites, when it is bound."""


@hookspec
def veomni_model_views() -> Iterable[ModelViewSpec]:  # type: ignore[empty-body]
    """How models are read that are divided over ranks."""


@hookspec
def veomni_models() -> Iterable[ModelSpec]:  # type: ignore[empty-body]
    """Models that transformers does not have, and converters of checkpoints. Since version 2."""


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
    "veomni_model_rules": ModelRule,
    "veomni_model_views": ModelViewSpec,
    "veomni_models": ModelSpec,
    "veomni_commands": CommandSpec,
}
