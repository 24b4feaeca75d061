"""Applies a plan to one model instance, the only step that changes anything, and takes it back."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from veomni_core import hub_kernels
from veomni_core.bound_classes import run_eager
from veomni_core.bound_subclass import NO_PICKLE, bindings_in
from veomni_core.change_set import ChangeSet
from veomni_core.changes import AttributeChange
from veomni_core.config import ON_CHANGE, OpsConfig
from veomni_core.discovery import discover
from veomni_core.errors import BindingError, BoundModelPickleError, ConfigError, UnknownNameError, did_you_mean
from veomni_core.placement import device_type_of, misplaced, placement_notes
from veomni_core.plan import Plan, make_plan
from veomni_core.ranks import AGREEMENT_TIMEOUT, agree_on_plan
from veomni_core.receipt import Receipt, Verification
from veomni_core.registry import Registry
from veomni_core.site_changes import site_changes
from veomni_core.verification import verify_plan

logger = logging.getLogger(__name__)
_BINDING = "_veomni_binding"


class Binding:
    """A plan applied to one model. As a context manager it is undone on leaving.

    The model is referenced weakly, so that a bound model is freed as soon as an unbound one would be.
    """

    def __init__(self, model: nn.Module, plan: Plan, changes: ChangeSet, verification: Verification) -> None:
        self._model = weakref.ref(model)
        self.plan, self.verification = plan, verification
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
        model = self._model()
        where = "" if model is None else misplaced(model, self.plan)
        return Receipt(self.plan, self.verification, self.sequence_parallel, dict(self._changes.changed()), where)

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
        duplicate = Binding(copy.deepcopy(self.model, memo), self.plan, ChangeSet(), self.verification)
        memo[id(self)] = duplicate
        duplicate._changes = copy.deepcopy(self._changes, memo)
        duplicate._changes.classes.binding = duplicate
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BoundModelPickleError(NO_PICKLE)


def binding_of(model: nn.Module) -> Binding | None:
    """The binding whose kernels run in ``model``, or ``None``.

    ``model`` may wrap the model that was bound, be a part of it, or be a copy of a part.
    """
    for module in model.modules():
        if _BINDING in vars(module):
            return vars(module)[_BINDING]  # type: ignore[no-any-return]
    return next((made.binding for module in model.modules() for made in bindings_in(module)), None)


def bind(
    model: nn.Module,
    plan_or_config: Plan | OpsConfig | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    autocast: Any = None,
    device: Any = None,
    verify: bool = False,
    on_change: str | None = None,
    training_logits: str | None = None,
    agree: bool = True,
    group: Any = None,
    agreement_timeout: float = AGREEMENT_TIMEOUT,
) -> Binding:
    """Put the plan's kernels into ``model``, and into no other model.

    Given a config, the plan is made first. ``autocast`` is the dtype of the autocast that the forwards will run under
    (``bfloat16``, ``float16``, or the torch dtype), as of ``Trainer(bf16=True)``: float32 weights may then have kernels
    that compute in it alone. ``device`` is where the model will run: the machine's accelerator without it, wherever the
    model is now, since trainers move it there.

    All ranks of a distributed job must agree on the plan: ``group`` names the process group whose ranks bind this model
    (all ranks without it), ``agreement_timeout`` the seconds that they wait for one another, and ``agree=False`` lets
    this rank bind on its own. With ``verify`` every chosen kernel first runs through its op's contract on the model's
    device and in its dtype, and every site is compared with the module's own code. ``on_change`` and
    ``training_logits`` override the config's (see :class:`veomni_core.OpsConfig`).

    Raises:
        BindingError: the model, or a part of it, is bound already; two rules put kernels into one module; or
            transformers would replace the kernels again.
        ConfigError: ``autocast`` or ``device`` is given beside a plan, which was made for its own.
        HostError: ``device`` is none that is here.
        KernelLoadError: a kernel's library fails to import; the model is left as it was.
        ConformanceError: ``verify`` found a kernel that does not compute what its contract says, or a site whose
            results differ from its module's own.
        PlanMismatchError: ranks do not agree, or some did not come.
    """
    if on_change is not None and on_change not in ON_CHANGE:
        raise UnknownNameError(f"on_change: {on_change!r} is unknown. {did_you_mean(str(on_change), ON_CHANGE)}")
    _refuse_unbindable(model)
    _release_copies(model)
    ranks: dict[str, Any] = {"agree": agree, "group": group, "timeout": agreement_timeout}
    if isinstance(plan_or_config, Plan):
        if autocast is not None or device is not None:
            raise ConfigError("a plan was made for one device and autocast: give those to make_plan, not to bind")
        registry = registry or discover()
        plan = agree_on_plan(lambda: plan_or_config, **ranks)
        options = {"on_change": on_change or "raise", "training_logits": training_logits or "deferred"}
        return apply_plan(model, plan, registry, verify=verify, **options)
    config = plan_or_config
    if not isinstance(config, OpsConfig):
        config = OpsConfig.from_dict(config, registry)
    registry = registry or config.registry
    device_type = device_type_of(device)

    def make() -> Plan:
        hardware = registry.detect_hardware(device_type)
        return make_plan(model, config, registry=registry, hardware=hardware, autocast=autocast)

    plan = agree_on_plan(make, **ranks)
    return apply_plan(
        model,
        plan,
        registry,
        verify=verify,
        on_change=on_change or config.on_change,
        training_logits=training_logits or config.training_logits,
    )


def apply_plan(
    model: nn.Module,
    plan: Plan,
    registry: Registry,
    *,
    verify: bool = False,
    on_change: str = "raise",
    training_logits: str = "deferred",
) -> Binding:
    """:func:`bind` for a plan that all ranks already have."""
    _refuse_unbindable(model)
    kernels = {planned.spec.key: planned.spec.load() for planned in plan.kernels}
    verification = Verification()
    if verify:
        if why := misplaced(model, plan):
            raise BindingError(f"verify=True runs the kernels where the model is, but {why}")
        verification = verify_plan(model, plan, registry, kernels)
    changes = ChangeSet(on_change, training_logits)
    changes.classes.binding = binding = Binding(model, plan, changes, verification)
    try:
        changes.apply(AttributeChange(model, _BINDING, binding))
        for refusal in hub_kernels.kept_out_of(model):
            changes.apply(refusal)
        for note in placement_notes(model, plan):
            changes.apply(note)
        for path, owner, change in site_changes(model, plan, registry, kernels):
            changes.apply(change, path, owner)
        changes.refuse_hidden()
    except BaseException:
        changes.revert()
        raise
    _warn_of_sites_left_eager(plan)
    return binding


def _refuse_unbindable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise BindingError(f"bind needs a torch.nn.Module, not a {type(model).__name__}")
    for module in model.modules():
        paths = [classes.paths[module] for classes in bindings_in(module) if module in classes.paths]
        if paths or _BINDING in vars(module):
            raise BindingError(
                f"this model is bound already ({paths[0] if paths else 'the model'}): call binding_of(model).undo() "
                "first"
            )
    hub_kernels.refuse_model_with(model)


def _release_copies(model: nn.Module) -> None:
    """Copies of a bound model's modules, in a model that is bound anew, run their own code again first."""
    for module in model.modules():
        if any(bindings_in(module)):
            run_eager(module)
    hub_kernels.admit_again(model)


def _warn_of_sites_left_eager(plan: Plan) -> None:
    for op in plan.ops:
        uncovered = [decision for decision in op.left_eager if not decision.as_asked and op.asked != "auto"]
        if uncovered:
            reasons = "; ".join(dict.fromkeys(decision.reason for decision in uncovered))
            logger.warning("%s: %d of %d sites stay eager: %s", op.config_field, len(uncovered), len(op.sites), reasons)
