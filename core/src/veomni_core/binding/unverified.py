"""Refuses a plan whose kernels must pass ``veomni verify`` on this machine first, and have not."""

from __future__ import annotations

from veomni_core.discovery.registry import Registry
from veomni_core.errors import KernelUnavailableError
from veomni_core.planning.evidence import evidence_on
from veomni_core.planning.plan import Plan
from veomni_core.planning.selection import not_certified


def refuse_unverified(plan: Plan, registry: Registry) -> None:
    """Raise if a kernel that must pass ``veomni verify`` before it is used has not passed it here.

    A plan for this machine has such kernels only where they passed. One for named hardware, or from another machine,
    does not know.

    Raises:
        KernelUnavailableError: a kernel has not passed; the message says how to check it.
    """
    if not any(planned.spec.digest or planned.spec.suspicions for planned in plan.kernels):
        return
    hardware = registry.detect_hardware(plan.hardware.torch_device_type)
    in_question = [(each, reason) for each in plan.kernels if (reason := each.spec.must_pass_first(hardware))]
    if not in_question:
        return
    evidence = evidence_on(hardware)
    reasons = []
    for planned, reason in in_question:
        decisions = (each for each in plan.decisions if each.spec == planned.spec)
        dtypes = tuple(dict.fromkeys(dtype for each in decisions for dtype in each.dtypes))
        why = not_certified(evidence, planned.spec, registry.plugin_of(planned.spec), reason, dtypes)
        reasons += [f"{planned.spec} {why}"] if why else []
    if reasons:
        raise KernelUnavailableError("; ".join(reasons))
