"""The core of the VeOmni kernel ecosystem: public names, each imported on first use.

Importing this package loads neither torch nor any plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veomni_conformance.bound_models.shadow import Shadow
    from veomni_core.binding.bind import Binding, apply_plan, bind, binding_of
    from veomni_core.binding.receipt import Receipt
    from veomni_core.descriptions.hardware import Hardware, HardwareRequirement
    from veomni_core.descriptions.hookspecs import hookimpl
    from veomni_core.descriptions.kernel_option import KernelOption
    from veomni_core.descriptions.kernel_spec import KernelSpec
    from veomni_core.descriptions.op_spec import OpSpec, VariantSpec
    from veomni_core.descriptions.slot import OpSlot
    from veomni_core.descriptions.spec import (
        CommandSpec,
        DeviceSpec,
        JobConditions,
        ModelRule,
        ModelSpec,
        ModelViewSpec,
        SiteRule,
    )
    from veomni_core.descriptions.suspicion import Suspicion
    from veomni_core.discovery.discover import discover
    from veomni_core.discovery.registry import PluginRecord, Registry
    from veomni_core.planning.config import OpsConfig
    from veomni_core.planning.config import OpsConfig as OpsImplementationConfig
    from veomni_core.planning.plan import Plan
    from veomni_core.planning.planner import make_plan, plan_sites
    from veomni_core.sites.find import find_sites
    from veomni_core.sites.site import Site
    from veomni_transformers.build import build_foundation_model
    from veomni_transformers.engine.parallel_plan import get_parallel_plan
    from veomni_transformers.token_logprobs import TokenLogprobs, token_logprobs

_HOME = {
    "Binding": "binding.bind",
    "CommandSpec": "descriptions.spec",
    "DeviceSpec": "descriptions.spec",
    "Hardware": "descriptions.hardware",
    "HardwareRequirement": "descriptions.hardware",
    "JobConditions": "descriptions.spec",
    "KernelOption": "descriptions.kernel_option",
    "KernelSpec": "descriptions.kernel_spec",
    "ModelRule": "descriptions.spec",
    "ModelSpec": "descriptions.spec",
    "ModelViewSpec": "descriptions.spec",
    "OpSlot": "descriptions.slot",
    "OpSpec": "descriptions.op_spec",
    "OpsConfig": "planning.config",
    "Plan": "planning.plan",
    "PluginRecord": "discovery.registry",
    "Receipt": "binding.receipt",
    "Registry": "discovery.registry",
    "Site": "sites.site",
    "SiteRule": "descriptions.spec",
    "Suspicion": "descriptions.suspicion",
    "VariantSpec": "descriptions.op_spec",
    "apply_plan": "binding.bind",
    "bind": "binding.bind",
    "binding_of": "binding.bind",
    "discover": "discovery.discover",
    "find_sites": "sites.find",
    "hookimpl": "descriptions.hookspecs",
    "make_plan": "planning.planner",
    "plan_sites": "planning.planner",
}

# Names that other distributions of the family bring.
_ELSEWHERE = {
    "Shadow": "veomni_conformance.bound_models.shadow",
    "TokenLogprobs": "veomni_transformers.token_logprobs",
    "build_foundation_model": "veomni_transformers.build",
    "get_parallel_plan": "veomni_transformers.engine.parallel_plan",
    "token_logprobs": "veomni_transformers.token_logprobs",
}

__all__ = [
    "Binding",
    "CommandSpec",
    "DeviceSpec",
    "Hardware",
    "HardwareRequirement",
    "JobConditions",
    "KernelOption",
    "KernelSpec",
    "ModelRule",
    "ModelSpec",
    "ModelViewSpec",
    "OpSlot",
    "OpSpec",
    "OpsConfig",
    "OpsImplementationConfig",
    "Plan",
    "PluginRecord",
    "Receipt",
    "Registry",
    "Shadow",
    "Site",
    "SiteRule",
    "Suspicion",
    "TokenLogprobs",
    "VariantSpec",
    "apply_plan",
    "bind",
    "binding_of",
    "build_foundation_model",
    "discover",
    "find_sites",
    "get_parallel_plan",
    "hookimpl",
    "make_plan",
    "plan_sites",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name == "OpsImplementationConfig":
        return importlib.import_module("veomni_core.planning.config").OpsConfig
    if name in _ELSEWHERE:
        return importlib.import_module("veomni_core.descriptions.references").load_from(f"{_ELSEWHERE[name]}:{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'veomni_core' has no attribute {name!r}")
    return getattr(importlib.import_module(f"veomni_core.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
