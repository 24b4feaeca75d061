"""Applies a plan to one model instance, the only step that changes anything, and takes it back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from veomni_core import hub_kernels
from veomni_core.config import OpsConfig
from veomni_core.discovery import discover
from veomni_core.errors import BindingError, BoundModelPickleError
from veomni_core.plan import Plan, make_plan
from veomni_core.ranks import agree_on_plan
from veomni_core.receipt import Receipt
from veomni_core.registry import Registry
from veomni_core.sites.find import locator_of
from veomni_core.sites.site import AttributeChange, Change
from veomni_core.spec import KernelSpec, SiteRule
from veomni_core.testing import check_kernel

logger = logging.getLogger(__name__)
_BINDING = "_veomni_binding"
_GUARD = "_veomni_pickle_guard"


class Binding:
    """A plan applied to one model. As a context manager it is undone on leaving."""

    def __init__(self, model: nn.Module, plan: Plan, changes: list[Change], receipt: Receipt) -> None:
        self.model, self.plan, self.receipt = model, plan, receipt
        self._changes = changes

    @property
    def active(self) -> bool:
        """Whether the model runs the plan's kernels now."""
        return binding_of(self.model) is self

    def undo(self) -> None:
        """Restore the model exactly as it was before.

        Raises:
            BindingError: already undone, or something replaced a bound attribute since, which undoing would lose.
        """
        if not self.active:
            raise BindingError("this binding is not in force any more; it was undone before")
        outermost = {change.place: change for change in self._changes}.values()
        replaced = [what for change in outermost if (what := change.overridden())]
        if replaced:
            raise BindingError(
                f"undo would lose changes made after bind: {'; '.join(dict.fromkeys(replaced))}. Take those back first"
            )
        _revert(self._changes)

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.active:
            self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        twin = Binding(copy.deepcopy(self.model, memo), self.plan, [], self.receipt)
        memo[id(self)] = twin
        twin._changes = [copy.deepcopy(change, memo) for change in self._changes]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BoundModelPickleError(_NO_PICKLE)


class _PickleGuard:
    """Stands in every changed module, so that pickling it fails instead of losing its kernel."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BoundModelPickleError(_NO_PICKLE)

    def __deepcopy__(self, memo: dict[int, Any]) -> _PickleGuard:
        return _PickleGuard()


_NO_PICKLE = (
    "a bound model can't be pickled: its kernels would silently be lost. Save model.state_dict() or "
    "model.save_pretrained(), or call binding_of(model).undo() first; after loading, bind again"
)


def binding_of(model: nn.Module) -> Binding | None:
    """The binding in force on ``model`` (or on a model that it wraps), or ``None``."""
    return next((vars(module)[_BINDING] for module in model.modules() if _BINDING in vars(module)), None)


def bind(
    model: nn.Module,
    plan_or_config: Plan | OpsConfig | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    verify: bool = False,
) -> Binding:
    """Put the plan's kernels into ``model``, and into no other model.

    Given a config, the plan is made first, and all ranks of a distributed job must agree on it. With ``verify`` every
    chosen kernel first runs through its op's contract on the model's device and in its dtype.

    Raises:
        BindingError: the model is bound already, or transformers would replace the kernels again.
        KernelLoadError: a kernel's library fails to import; the model is left as it was.
        ConformanceError: ``verify`` found a kernel that does not compute what its contract says.
        PlanMismatchError: ranks do not agree.
    """
    _refuse_unbindable(model)
    if isinstance(plan_or_config, Plan):
        plan = plan_or_config
        registry = registry or discover()
        return apply_plan(model, agree_on_plan(lambda: plan), registry, verify=verify)
    config = plan_or_config
    if not isinstance(config, OpsConfig):
        config = OpsConfig.from_dict(config, registry)
    registry = registry or config.registry
    plan = agree_on_plan(lambda: make_plan(model, config, registry=registry))
    return apply_plan(model, plan, registry, verify=verify)


def apply_plan(model: nn.Module, plan: Plan, registry: Registry, *, verify: bool = False) -> Binding:
    """:func:`bind` for a plan that all ranks already have."""
    _refuse_unbindable(model)
    kernels = {planned.spec.key: planned.spec.load() for planned in plan.kernels}
    verified = tuple(_verify(planned.spec, model, registry) for planned in plan.kernels) if verify else ()
    receipt = Receipt(plan, verified)
    changes: list[Change] = []
    try:
        _apply(AttributeChange(model, _BINDING, Binding(model, plan, changes, receipt)), changes)
        for change in hub_kernels.kept_out_of(model):
            _apply(change, changes)
        for rule in registry.site_rules:
            _install(model, plan, rule, kernels, changes)
        for module in {id(change.target): change.target for change in _module_changes(changes)}.values():
            _apply(AttributeChange(module, _GUARD, _PickleGuard()), changes)
    except BaseException:
        _revert(changes)
        raise
    _warn_of_sites_left_eager(plan)
    return vars(model)[_BINDING]  # type: ignore[no-any-return]


def _install(
    model: nn.Module,
    plan: Plan,
    rule: SiteRule,
    kernels: Mapping[tuple[str, str, str], Callable[..., Any]],
    changes: list[Change],
) -> None:
    locator = None  # loaded for a first site only: a plugin's rule that can't be imported harms no model without one
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
            locator = locator or locator_of(rule)
            for change in locator.install(model, site, kernel):
                _apply(change, changes)


def _apply(change: Change, changes: list[Change]) -> None:
    change.apply()
    changes.append(change)


def _revert(changes: list[Change]) -> None:
    while changes:
        changes.pop().revert()


def _module_changes(changes: list[Change]) -> list[AttributeChange]:
    return [c for c in changes if isinstance(c, AttributeChange) and isinstance(c.target, nn.Module)]


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
