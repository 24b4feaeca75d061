"""Sites of norms, kernels for them, and the plans that they give."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from veomni_conformance.given_kernels import definitions
from veomni_core import HardwareRequirement, KernelSpec, OpsConfig, Site, plan_sites
from veomni_core.discovery.registry import PluginRecord, build_registry

NORMS = tuple(
    Site("rms_norm", f"layers.{i}.norm", "norm modules", variant, "proven", "bfloat16")
    for i, variant in enumerate(("standard", "standard", "offset"))
)
UNPROVEN = Site("rms_norm", "odd.norm", "norm modules", None, "standard: 30% of elements differ", "bfloat16")
MLP = Site("swiglu_mlp", "layers.0.mlp", "gated MLP modules", "standard", "proven", "bfloat16")


def kernel(name, variant="standard", op="rms_norm", **options):
    return KernelSpec(name, op, variant, "m:f", **options)


def registry(*kernels, vouched_for=True):
    """What one plugin describes. Unless its kernels are strangers', those who define their ops name them."""
    found = build_registry([*definitions(), PluginRecord("p", "veomni-p", "1.2", "p", kernels=kernels)], {})
    return vouching(found, *kernels) if vouched_for else found


def vouching(found, *kernels, distribution="veomni-p"):
    """The registry ``found``, in which the ops name ``kernels`` as published by ``distribution``."""
    ops = dict(found.ops)
    for each in kernels:
        op = ops[each.op_name]
        ops[op.name] = replace(op, published={**op.published, each.name: distribution})
    return replace(found, ops=MappingProxyType(ops))


HOPPER = HardwareRequirement("cuda", min_compute_capability=90)
REGISTRY = registry(
    kernel("liger_kernel", hardware=HardwareRequirement("cuda"), preference=60),
    kernel("liger_kernel", "offset", hardware=HardwareRequirement("cuda"), preference=60),
    kernel("quack", hardware=HOPPER, preference=70),
    kernel("torch", preference=10),
    kernel("torch", "offset", preference=10),
    kernel("shy", preference=0),
    kernel("half", dtypes=("float16",)),
    kernel("inference", backward=False),
)


def plan(value, sites=NORMS, hardware="a100", registry=REGISTRY, **more):
    config = OpsConfig.from_dict({"preset": "eager", "rms_norm_implementation": value, **more}, registry, environ={})
    return plan_sites(sites, config, hardware=hardware)


def chosen(plan, op="rms_norm"):
    (decision,) = [d for d in plan.ops if d.op_name == op]
    return [site.kernel for site in decision.sites]


def reasons(plan):
    (decision,) = [d for d in plan.ops if d.op_name == "rms_norm"]
    return [site.reason for site in decision.sites]
