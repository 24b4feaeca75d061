"""The hooks that a plugin may implement. Each only returns descriptions (specs) and has no side effects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec, VariantSpec
from veomni_core.descriptions.spec import CommandSpec, DeviceSpec, ModelRule, ModelViewSpec, SiteRule

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
def veomni_models() -> Iterable[Any]:  # type: ignore[empty-body]
    """Models that transformers does not have, and converters of checkpoints (``ModelSpec``). Since version 2."""


@hookspec
def veomni_commands() -> Iterable[CommandSpec]:  # type: ignore[empty-body]
    """Subcommands for the ``veomni`` command line."""


# Of each hook, in the order in which they are called: where a plugin's record has what it returns, and its type.
DESCRIPTIONS: dict[str, tuple[str, type | str]] = {
    "veomni_ops": ("ops", OpSpec),
    "veomni_variants": ("variants", VariantSpec),
    "veomni_kernels": ("kernels", KernelSpec),
    "veomni_devices": ("devices", DeviceSpec),
    "veomni_sites": ("site_rules", SiteRule),
    "veomni_model_rules": ("model_rules", ModelRule),
    "veomni_model_views": ("model_views", ModelViewSpec),
    "veomni_models": ("models", "veomni_transformers.model_spec:ModelSpec"),
    "veomni_commands": ("commands", CommandSpec),
}
