"""Puts a plan's kernels into a model: checks the model and the kernels first, and changes the model last."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from veomni_core.binding.binding import Binding
from veomni_core.binding.evaluation import loaded
from veomni_core.binding.model_rules import ModelRules
from veomni_core.binding.placement import misplaced
from veomni_core.binding.receipt import Verification
from veomni_core.binding.site_changes import Kernels, site_changes
from veomni_core.binding.watched_code import WatchedCode, look_when_training_starts
from veomni_core.changes.bound_classes import run_eager
from veomni_core.changes.bound_subclass import bindings_in
from veomni_core.changes.change import Change
from veomni_core.changes.change_set import ChangeSet
from veomni_core.changes.transformation import transformations_of
from veomni_core.descriptions.references import load_for, load_if_installed
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError, KernelUnavailableError
from veomni_core.planning.evidence import evidence_on
from veomni_core.planning.plan import Plan
from veomni_core.planning.selection import not_certified
from veomni_core.sites.walk import named_modules

logger = logging.getLogger(__name__)
_VERIFY_PLAN = "veomni_conformance.bound_models.verification:verify_plan"
_REFUSE_LOST_GRADIENTS = "veomni_conformance.bound_models.lost_gradients:refuse_lost_gradients"
_lock = threading.Lock()
_being_bound: set[nn.Module] = set()  # modules of the models that bind works on now, in any thread


def put_into(
    model: nn.Module, plan: Plan, registry: Registry, verify: bool, settings: tuple[str, str], code: WatchedCode
) -> Binding:
    """Change the model, once all ranks have the plan. ``code`` has what was read of it, or nothing."""
    if not verify:
        refuse_unverified(plan, registry)
    kernels = {planned.spec: loaded(planned.spec) for planned in plan.kernels}
    if plan.training and not verify and plan.unverified and (refuse := load_if_installed(_REFUSE_LOST_GRADIENTS)):
        refuse(plan, registry, kernels)
    verification = Verification()
    if verify:
        if why := misplaced(model, plan):
            raise BindingError(f"verify=True runs the kernels where the model is, but {why}")
        # Imported when it is wanted: it is a third of what bind would load.
        verify_plan = load_for("verify=True checks the kernels, and", BindingError, _VERIFY_PLAN)
        verification = verify_plan(model, plan, registry, kernels)
    binding = Binding(model, plan, ChangeSet(*settings), verification, code)
    binding.apply(_changes(model, plan, registry, kernels, code))
    _warn_of_sites_left_eager(plan)
    return binding


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
    evidence = evidence_on(hardware)
    reasons = []
    for planned, reason in in_question:
        decisions = (each for each in plan.decisions if each.spec == planned.spec)
        dtypes = tuple(dict.fromkeys(dtype for each in decisions for dtype in each.dtypes))
        why = not_certified(evidence, planned.spec, registry.plugin_of(planned.spec), reason, dtypes)
        reasons += [f"{planned.spec} {why}"] if why else []
    if reasons:
        raise KernelUnavailableError("; ".join(reasons))


def _changes(
    model: nn.Module, plan: Plan, registry: Registry, kernels: Kernels, code: WatchedCode
) -> Iterator[tuple[str, str, Change]]:
    """All changes of a binding, each with its module path and its owner."""
    rules = ModelRules(registry)
    yield from code.watched(rules.changes(model, plan, before_sites=True))
    yield from site_changes(model, plan, registry, kernels, code)
    yield from code.watched(rules.changes(model, plan, before_sites=False))
    for look in look_when_training_starts(model):
        yield "", "", look


@contextmanager
def bound_alone(model: nn.Module, registry: Registry) -> Iterator[None]:
    """The time from before planning until ``model`` is bound, in which no other thread binds it or a part of it.

    Raises if the model can't be bound. Unbinds modules that were copied into it from another bound model.
    """
    if not isinstance(model, nn.Module):
        raise BindingError(f"bind needs a torch.nn.Module, not a {type(model).__name__}")
    modules = dict.fromkeys(module for _, module in named_modules(model))
    with _lock:
        if modules.keys() & _being_bound:
            raise BindingError("another bind of this model is running: wait for it, and call binding_of(model)")
        _being_bound.update(modules)
    try:
        _refuse_bound(modules)
        rules = ModelRules(registry)
        for rule in rules:
            rule.refuse(model)
        for module in modules:
            if any(bindings_in(module)):  # copied from another bound model into this one
                run_eager(module)
        for rule in rules:
            rule.release(model)
        yield
    finally:
        _being_bound.difference_update(modules)


def _refuse_bound(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        paths = [classes.paths[module] for classes in bindings_in(module) if module in classes.paths]
        if paths or any(isinstance(each, Binding) for each in transformations_of(module)):
            where = paths[0] if paths else "the model"
            raise BindingError(f"this model is bound already ({where}): call binding_of(model).undo() first")


def _warn_of_sites_left_eager(plan: Plan) -> None:
    for op in plan.ops:
        uncovered = [decision for decision in op.left_eager if not decision.as_asked and op.asked != "auto"]
        if uncovered:
            reasons = "; ".join(dict.fromkeys(decision.reason for decision in uncovered))
            logger.warning("%s: %d of %d sites stay eager: %s", op.config_field, len(uncovered), len(op.sites), reasons)
