"""Applies a plan to one model instance, the only step that changes anything, and takes it back."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from veomni_core import hub_kernels
from veomni_core.changes import NO_PICKLE, AttributeChange, ChangeSet
from veomni_core.config import OpsConfig
from veomni_core.discovery import discover
from veomni_core.errors import BindingError, BoundModelPickleError
from veomni_core.plan import Plan, make_plan
from veomni_core.ranks import agree_on_plan
from veomni_core.receipt import Receipt
from veomni_core.registry import Registry
from veomni_core.sites.find import locator_of
from veomni_core.spec import KernelSpec, SiteRule
from veomni_core.testing import check_kernel

logger = logging.getLogger(__name__)
_BINDING = "_veomni_binding"


class Binding:
    """A plan applied to one model. As a context manager it is undone on leaving.

    The model is referenced weakly, so that a bound model is freed as soon as an unbound one would be.
    """

    def __init__(self, model: nn.Module, plan: Plan, changes: ChangeSet, verified: tuple[str, ...] = ()) -> None:
        self._model = weakref.ref(model)
        self.plan, self.verified = plan, verified
        self.sequence_parallel = ""
        self._changes = changes

    @property
    def model(self) -> nn.Module:
        """The model that is bound.

        Raises:
            BindingError: the model was freed.
        """
        model = self._model()
        if model is None:
            raise BindingError("the model of this binding was freed")
        return model

    @property
    def receipt(self) -> Receipt:
        """What runs now: the plan, and every site that was changed since."""
        return Receipt(self.plan, self.verified, self.sequence_parallel, dict(self._changes.changed()))

    @property
    def active(self) -> bool:
        """Whether the model runs the plan's kernels now."""
        model = self._model()
        return model is not None and binding_of(model) is self

    def undo(self) -> None:
        """Give the model its own code back. What somebody else has set on it since stays.

        Raises:
            BindingError: already undone, or the model runs sequence-parallel on top of it.
        """
        if not self.active:
            raise BindingError("this binding is not in force any more; it was undone before")
        if self.sequence_parallel:
            raise BindingError(f"the model runs sequence-parallel ({self.sequence_parallel}): undo() that first")
        tuple(self._changes.changed())  # says what was set since, and so stays
        self._changes.revert()

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.active:
            self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        duplicate = Binding(copy.deepcopy(self.model, memo), self.plan, ChangeSet(), self.verified)
        memo[id(self)] = duplicate
        duplicate._changes = copy.deepcopy(self._changes, memo)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BoundModelPickleError(NO_PICKLE)


def binding_of(model: nn.Module) -> Binding | None:
    """The binding in force on ``model`` (or on a model that it wraps), or ``None``."""
    return next((vars(module)[_BINDING] for module in model.modules() if _BINDING in vars(module)), None)


def bind(
    model: nn.Module,
    plan_or_config: Plan | OpsConfig | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    verify: bool = False,
    on_change: str | None = None,
) -> Binding:
    """Put the plan's kernels into ``model``, and into no other model.

    Given a config, the plan is made first, and all ranks of a distributed job must agree on it. With ``verify`` every
    chosen kernel first runs through its op's contract on the model's device and in its dtype. ``on_change`` overrides
    the config's (see :class:`veomni_core.OpsConfig`).

    Raises:
        BindingError: the model is bound already, or transformers would replace the kernels again.
        KernelLoadError: a kernel's library fails to import; the model is left as it was.
        ConformanceError: ``verify`` found a kernel that does not compute what its contract says.
        PlanMismatchError: ranks do not agree.
    """
    _refuse_unbindable(model)
    if isinstance(plan_or_config, Plan):
        registry = registry or discover()
        plan = agree_on_plan(lambda: plan_or_config)
        return apply_plan(model, plan, registry, verify=verify, on_change=on_change or "raise")
    config = plan_or_config
    if not isinstance(config, OpsConfig):
        config = OpsConfig.from_dict(config, registry)
    registry = registry or config.registry
    plan = agree_on_plan(lambda: make_plan(model, config, registry=registry))
    return apply_plan(model, plan, registry, verify=verify, on_change=on_change or config.on_change)


def apply_plan(
    model: nn.Module, plan: Plan, registry: Registry, *, verify: bool = False, on_change: str = "raise"
) -> Binding:
    """:func:`bind` for a plan that all ranks already have."""
    _refuse_unbindable(model)
    kernels = {planned.spec.key: planned.spec.load() for planned in plan.kernels}
    verified = tuple(_verify(planned.spec, model, registry) for planned in plan.kernels) if verify else ()
    changes = ChangeSet(on_change)
    binding = Binding(model, plan, changes, verified)
    try:
        changes.apply(AttributeChange(model, _BINDING, binding))
        for change in hub_kernels.kept_out_of(model):
            changes.apply(change)
        for rule in registry.site_rules:
            _install(model, plan, rule, kernels, changes)
    except BaseException:
        changes.revert()
        raise
    _warn_of_sites_left_eager(plan)
    return binding


def _install(
    model: nn.Module,
    plan: Plan,
    rule: SiteRule,
    kernels: Mapping[tuple[str, str, str], Callable[..., Any]],
    changes: ChangeSet,
) -> None:
    locator = locator_of(rule)
    for op in plan.ops:
        for decision in op.sites:
            site = decision.site
            if site.rule != rule.name:
                continue
            if decision.bound:
                kernel = kernels[(op.op_name, site.variant or "", decision.kernel)]
            elif rule.installs_eager and decision.as_asked:
                kernel = None
            else:
                continue
            for change in locator.install(model, site, kernel):
                changes.apply(change, site.path)


def _refuse_unbindable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise BindingError(f"bind needs a torch.nn.Module, not a {type(model).__name__}")
    if binding_of(model) is not None:
        raise BindingError("this model is bound already: call binding_of(model).undo() first")
    hub_kernels.refuse_model_with(model)


def _verify(spec: KernelSpec, model: nn.Module, registry: Registry) -> str:
    parameter = next(model.parameters(), torch.empty(0))
    dtype = str(parameter.dtype).removeprefix("torch.")
    report = check_kernel(spec, parameter.device, dtype, op=registry.op(spec.op_name))
    report.raise_if_failed()
    return f"{spec} on {parameter.device} in {dtype}"


def _warn_of_sites_left_eager(plan: Plan) -> None:
    for op in plan.ops:
        uncovered = [decision for decision in op.left_eager if not decision.as_asked and op.asked != "auto"]
        if uncovered:
            reasons = "; ".join(dict.fromkeys(decision.reason for decision in uncovered))
            logger.warning("%s: %d of %d sites stay eager: %s", op.config_field, len(uncovered), len(op.sites), reasons)
