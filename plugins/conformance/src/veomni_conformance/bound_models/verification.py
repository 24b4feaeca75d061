"""``verify=True``: checks every kernel against its contract, and every bound site against its module's own code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from veomni_conformance import check_kernel
from veomni_conformance.bound_models.exact_runs import exact_run
from veomni_conformance.bound_models.model_calls import RecordedCall, recorded_calls, undisturbed
from veomni_conformance.bound_models.site_comparison import Run, autocast_on, compare
from veomni_conformance.bound_models.site_locators import RequestedSiteLocator, SituatedSiteLocator
from veomni_conformance.ledger import Certificate, record
from veomni_conformance.this_machine import ThisMachine
from veomni_core.binding.receipt import Verification
from veomni_core.binding.site_changes import Kernels, changes_at, decisions_of
from veomni_core.changes.change_set import ChangeSet
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.discovery.registry import Registry
from veomni_core.errors import ConformanceError
from veomni_core.planning.decisions import SiteDecision
from veomni_core.planning.plan import Plan
from veomni_core.sites.find import locator_of
from veomni_core.sites.site import SiteLocator
from veomni_ops.contract import Contract, contract_for, dtype_name


def verify_plan(model: nn.Module, plan: Plan, registry: Registry, kernels: Kernels) -> Verification:
    """Run the plan's kernels on the model's device and in its dtype. ``model`` must be unbound, and is left unchanged.

    If the plan has an autocast dtype, kernels of ops that follow autocast are checked in that dtype, and sites run
    under that autocast.

    For each site, a forward of the whole model on a few tokens records the inputs of its module. On these inputs the
    module runs twice: with its own code, and with only this site bound. The results are compared, and the gradients of
    its floating-point inputs and of its own parameters.

    Raises:
        ConformanceError: a kernel breaks its contract, or a site differs from its module's own code by more than twice
            the contract's tolerance.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        no_weights = "the model has weights on the meta device, where nothing can be computed"
        return Verification(not_compared=tuple(f"{planned.spec}: {no_weights}" for planned in plan.kernels))
    held = tuple(_check(planned.spec, model, registry, plan) for planned in plan.kernels)
    bound = [
        (locator_of(rule), decision, decision.spec)
        for rule in registry.site_rules
        for _, decision in decisions_of(plan, rule)
        if decision.spec is not None
    ]
    same: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    with undisturbed(model):
        with autocast_on(model, plan.autocast):
            calls, why_none = recorded_calls(model, {decision.site.path for _, decision, _ in bound})
        for locator, decision, spec in bound:
            call = calls.get(decision.site.path)
            why = why_none or "its module was not called"
            if call is not None:
                contract = contract_for(registry.op(spec.op_name), spec.variant)
                why = _compare(model, locator, decision, kernels, call, contract, plan.autocast)
            if why:
                left_out[f"{spec} at {decision.site.path or 'the model'}: {why}"] += 1
            else:
                same[f"{spec}"] += 1
    return Verification(held, tuple(f"{spec} at {count} sites" for spec, count in same.items()), tuple(left_out))


def _compare(
    model: nn.Module,
    locator: SiteLocator,
    decision: SiteDecision,
    kernels: Kernels,
    call: RecordedCall,
    contract: Contract,
    autocast: str | None,
) -> str:
    """Compare one site with its module's own code. Returns why that was not possible; empty if both agree.

    Raises:
        ConformanceError: they differ.
    """
    module, path = model.get_submodule(decision.site.path), decision.site.path
    gradients = decision.spec is None or decision.spec.backward
    requested = locator.run if isinstance(locator, RequestedSiteLocator) else None
    run = partial(requested, module) if requested else module
    own = Run.of(module, call, autocast, gradients, run=run)
    if own.problem:
        return f"its own code can't be run alone: {own.problem}"
    found: Iterable[tuple[str, Callable[[Any], Any]]] = ()
    if decision.spec is not None and isinstance(locator, SituatedSiteLocator):
        found = locator.situations(model, decision.site, decision.spec)
    in_situation = partial(Run.of, module, RecordedCall((), {}), autocast, False)
    situations = [(name, call_it, in_situation(run=partial(call_it, module))) for name, call_it in found]
    changes = ChangeSet()
    try:
        for change in changes_at(model, decision, locator, kernels):
            changes.apply(change, path, decision.site.rule)
        bound = Run.of(module, call, autocast, gradients, run=run)
        then = [(name, own, in_situation(run=partial(f, module))) for name, f, own in situations if not own.problem]
    finally:
        changes.revert()
    exact = partial(exact_run, module, call, gradients, run=requested)
    difference = _difference(own, bound, contract, autocast, exact)
    for name, own_then, bound_then in () if difference else then:
        if why := _difference(own_then, bound_then, contract, autocast):
            difference = f"with {name}, {why}"
            break
    if difference:
        raise ConformanceError(
            f"{decision.spec} at {path or 'the model'}, found by the rule "
            f"{decision.site.rule!r}, is not what the module's own code computes here: {difference}"
        )
    return ""


def _difference(
    own: Run, bound: Run, contract: Contract, autocast: str | None, exact: Callable[[], Run] | None = None
) -> str:
    return f"raised {bound.problem}" if bound.problem else compare(own, bound, contract, autocast, exact)


def _check(spec: KernelSpec, model: nn.Module, registry: Registry, plan: Plan) -> str:
    parameter, op = next(model.parameters(), torch.empty(0)), registry.op(spec.op_name)
    dtype = plan.autocast if plan.autocast and op.follows_autocast else dtype_name(parameter.dtype)
    report = check_kernel(spec, parameter.device, dtype, op=op)
    report.raise_if_failed()
    if plan.hardware.detected and not registry.vouches_for(spec):  # from now on `auto` may take it
        checked = ThisMachine(plan.hardware).checked(spec, registry.plugin_of(spec), dtype)
        record([Certificate.of_today(checked, report.shares)], {})
    return f"{spec} on {parameter.device} in {dtype}"
