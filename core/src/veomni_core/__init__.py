"""The core of the VeOmni kernel ecosystem: public names, each imported on first use.

Importing this package loads neither torch nor any plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veomni_core.binding import Binding, bind, binding_of
    from veomni_core.build import build_foundation_model
    from veomni_core.config import OpsConfig
    from veomni_core.config import OpsConfig as OpsImplementationConfig
    from veomni_core.discovery import discover
    from veomni_core.hardware import Hardware, HardwareRequirement
    from veomni_core.hookspecs import hookimpl
    from veomni_core.op_spec import OpSpec, VariantSpec
    from veomni_core.plan import Plan, make_plan
    from veomni_core.receipt import Receipt
    from veomni_core.registry import PluginRecord, Registry
    from veomni_core.sites.find import find_sites
    from veomni_core.sites.site import Site
    from veomni_core.slot import OpSlot
    from veomni_core.spec import CommandSpec, DeviceSpec, JobConditions, KernelSpec, SiteRule

_HOME = {
    "Binding": "binding",
    "CommandSpec": "spec",
    "DeviceSpec": "spec",
    "Hardware": "hardware",
    "HardwareRequirement": "hardware",
    "JobConditions": "spec",
    "KernelSpec": "spec",
    "OpSlot": "slot",
    "OpSpec": "op_spec",
    "OpsConfig": "config",
    "Plan": "plan",
    "PluginRecord": "registry",
    "Receipt": "receipt",
    "Registry": "registry",
    "Site": "sites.site",
    "SiteRule": "spec",
    "VariantSpec": "op_spec",
    "bind": "binding",
    "binding_of": "binding",
    "build_foundation_model": "build",
    "discover": "discovery",
    "find_sites": "sites.find",
    "hookimpl": "hookspecs",
    "make_plan": "plan",
}

__all__ = [
    "Binding",
    "CommandSpec",
    "DeviceSpec",
    "Hardware",
    "HardwareRequirement",
    "JobConditions",
    "KernelSpec",
    "OpSlot",
    "OpSpec",
    "OpsConfig",
    "OpsImplementationConfig",
    "Plan",
    "PluginRecord",
    "Receipt",
    "Registry",
    "Site",
    "SiteRule",
    "VariantSpec",
    "bind",
    "binding_of",
    "build_foundation_model",
    "discover",
    "find_sites",
    "hookimpl",
    "make_plan",
]


def __getattr__(name: str) -> Any:
    if name == "OpsImplementationConfig":
        return importlib.import_module("veomni_core.config").OpsConfig
    if name not in _HOME:
        raise AttributeError(f"module 'veomni_core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"veomni_core.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
