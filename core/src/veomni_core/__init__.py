"""The core of the VeOmni kernel ecosystem: public names, each imported on first use.

Importing this package loads neither torch nor any plugin.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veomni_conformance.bound_models.shadow import Shadow
    from veomni_core.binding.bind import apply_plan, bind
    from veomni_core.binding.binding import Binding, binding_of
    from veomni_core.binding.receipt import Receipt
    from veomni_core.descriptions.hardware import Hardware, HardwareRequirement
    from veomni_core.descriptions.hookspecs import hookimpl
    from veomni_core.descriptions.kernel_option import KernelOption
    from veomni_core.descriptions.kernel_spec import KernelSpec
    from veomni_core.descriptions.op_spec import OpSpec, VariantSpec
    from veomni_core.descriptions.slot import OpSlot
    from veomni_core.descriptions.spec import CommandSpec, DeviceSpec, ModelRule, ModelViewSpec, SiteRule
    from veomni_core.descriptions.suspicion import Suspicion
    from veomni_core.discovery.discover import discover
    from veomni_core.discovery.registry import PluginRecord, Registry
    from veomni_core.planning.config import OpsConfig
    from veomni_core.planning.plan import Plan
    from veomni_core.planning.planner import make_plan, plan_sites
    from veomni_core.sites.find import find_sites
    from veomni_core.sites.site import Site
    from veomni_ops.own_kernels import KERNEL_REGISTRY
    from veomni_ops.veomni_configs import OpsImplementationConfig
    from veomni_transformers.build import build_foundation_model
    from veomni_transformers.engine.parallel_plan import ParallelPlan, get_parallel_plan
    from veomni_transformers.jobs.job_conditions import JobConditions
    from veomni_transformers.model_spec import ModelSpec
    from veomni_transformers.token_logprobs import TokenLogprobs, token_logprobs

# Where each name is, by module.
_HOME = {
    "veomni_core.binding.bind": ("apply_plan", "bind"),
    "veomni_core.binding.binding": ("Binding", "binding_of"),
    "veomni_core.binding.receipt": ("Receipt",),
    "veomni_core.descriptions.hardware": ("Hardware", "HardwareRequirement"),
    "veomni_core.descriptions.hookspecs": ("hookimpl",),
    "veomni_core.descriptions.kernel_option": ("KernelOption",),
    "veomni_core.descriptions.kernel_spec": ("KernelSpec",),
    "veomni_core.descriptions.op_spec": ("OpSpec", "VariantSpec"),
    "veomni_core.descriptions.slot": ("OpSlot",),
    "veomni_core.descriptions.spec": ("CommandSpec", "DeviceSpec", "ModelRule", "ModelViewSpec", "SiteRule"),
    "veomni_core.descriptions.suspicion": ("Suspicion",),
    "veomni_core.discovery.discover": ("discover",),
    "veomni_core.discovery.registry": ("PluginRecord", "Registry"),
    "veomni_core.planning.config": ("OpsConfig",),
    "veomni_core.planning.plan": ("Plan",),
    "veomni_core.planning.planner": ("make_plan", "plan_sites"),
    "veomni_core.sites.find": ("find_sites",),
    "veomni_core.sites.site": ("Site",),
    # Other distributions of the family bring these.
    "veomni_conformance.bound_models.shadow": ("Shadow",),
    "veomni_ops.own_kernels": ("KERNEL_REGISTRY",),
    "veomni_ops.veomni_configs": ("OpsImplementationConfig",),
    "veomni_transformers.build": ("build_foundation_model",),
    "veomni_transformers.engine.parallel_plan": ("ParallelPlan", "get_parallel_plan"),
    "veomni_transformers.jobs.job_conditions": ("JobConditions",),
    "veomni_transformers.model_spec": ("ModelSpec",),
    "veomni_transformers.token_logprobs": ("TokenLogprobs", "token_logprobs"),
}

__all__ = ["KERNEL_REGISTRY", "Binding", "CommandSpec", "DeviceSpec", "Hardware", "HardwareRequirement"]
__all__ += ["JobConditions", "KernelOption", "KernelSpec", "ModelRule", "ModelSpec", "ModelViewSpec", "OpSlot"]
__all__ += ["OpSpec", "OpsConfig", "OpsImplementationConfig", "ParallelPlan", "Plan", "PluginRecord", "Receipt"]
__all__ += ["Registry", "Shadow", "Site", "SiteRule", "Suspicion", "TokenLogprobs", "VariantSpec", "apply_plan"]
__all__ += ["bind", "binding_of", "build_foundation_model", "discover", "find_sites", "get_parallel_plan", "hookimpl"]
__all__ += ["make_plan", "plan_sites", "token_logprobs"]


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOME.items() if name in names), "")
    if home.startswith("veomni_core."):
        return getattr(importlib.import_module(home), name)
    references = importlib.import_module("veomni_core.descriptions.references")
    if home:
        return references.load_from(f"{home}:{name}")
    line = None if name.startswith("__") else references.load_if_installed("veomni_ops.veomni_names:line_for")
    said = f"veomni_core has no {name}: {instead}" if line and (instead := line(name)) else ""
    if said and sys._getframe(1).f_globals["__name__"] == "importlib._bootstrap":
        # Python replaces an AttributeError's words where a name is imported.
        raise ImportError(said, name="veomni_core")
    raise AttributeError(said or f"module 'veomni_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
