"""Applies a plan to one model instance and undoes it. Only this step changes the model."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from veomni_core.binding import hub_kernels
from veomni_core.binding.placement import device_type_of, misplaced, placement_notes
from veomni_core.binding.ranks import AGREEMENT_TIMEOUT, agree_on_plan
from veomni_core.binding.receipt import Receipt, Verification
from veomni_core.binding.site_changes import site_changes
from veomni_core.binding.verification import verify_plan
from veomni_core.changes.bound_classes import run_eager
from veomni_core.changes.bound_subclass import NO_PICKLE, bindings_in
from veomni_core.changes.change import AttributeChange
from veomni_core.changes.change_set import ChangeSet
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError, BoundModelPickleError
from veomni_core.planning.config import ON_CHANGE, TRAINING_LOGITS, OpsConfig, one_of
from veomni_core.planning.plan import Plan
from veomni_core.planning.planner import make_plan

logger = logging.getLogger(__name__)
_BINDING = "_veomni_binding"


class Binding:
    """A plan that is applied to one model. Used as a context manager, it calls :meth:`undo` on exit.

    A binding holds only a weak reference to the model and so does not keep it alive.

    Attributes:
        plan: the :class:`~veomni_core.planning.plan.Plan` that was applied.
        verification: what ``verify=True`` checked; empty without it.
        sequence_parallel: how attention is split over ranks, in words; empty if it isn't.
    """

    def __init__(self, model: nn.Module, plan: Plan, changes: ChangeSet, verification: Verification) -> None:
        self._model = weakref.ref(model)
        self.plan, self.verification = plan, verification
        self.sequence_parallel = ""
        self._changes = changes

    @property
    def model(self) -> nn.Module:
        """The bound model.

        Raises:
            BindingError: the model was freed.
        """
        model = self._model()
        if model is None:
            raise BindingError("the model of this binding was freed")
        return model

    @property
    def receipt(self) -> Receipt:
        """What runs now: the plan, and every site that was changed after bind."""
        model = self._model()
        where = "" if model is None else misplaced(model, self.plan)
        return Receipt(self.plan, self.verification, self.sequence_parallel, dict(self._changes.changed()), where)

    @property
    def active(self) -> bool:
        """Whether the model runs the plan's kernels now."""
        model = self._model()
        return model is not None and binding_of(model) is self

    def undo(self) -> None:
        """Restore the model's own code. Attributes that other code has set since bind are kept.

        Raises:
            BindingError: the binding is already undone, its model was freed, or sequence parallelism runs on top of it.
        """
        if not self.active:
            raise BindingError("this binding is not in force: it is already undone, or its model was freed")
        if self.sequence_parallel:
            raise BindingError(f"the model runs sequence-parallel ({self.sequence_parallel}): undo() that first")
        tuple(self._changes.changed())  # logs what other code has set since bind, which undo keeps
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

    Args:
        model: the bound model, a wrapper around it, one of its submodules, or a copy of a submodule.
    """
    for module in model.modules():
        if _BINDING in vars(module):
            return vars(module)[_BINDING]
    return next((made.binding for module in model.modules() for made in bindings_in(module)), None)


def bind(
    model: nn.Module,
    config: OpsConfig | Mapping[str, Any],
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
    """Plan for this one model, and put the plan's kernels into it. Other models of its class keep their own code.

    Args:
        model: any ``torch.nn.Module`` that is not bound yet, typically a transformers model.
        config: which kernels to use, as a mapping (``{"preset": "auto"}``) or checked.
        registry: the plugins to choose from, for a config that is a mapping (see :meth:`veomni_core.OpsConfig.of`).
        autocast: the dtype of the ``torch.autocast`` that training will use (``"bfloat16"``, ``"float16"`` or the
            torch dtype), as with ``Trainer(bf16=True)``. Kernels that compute only in that dtype can then run over
            float32 weights.
        device: where the model will run. Without it, the machine's accelerator, even while the model is still on the
            CPU: trainers move it later.
        verify: first run every chosen kernel through its op's contract, on the model's device and in its dtype, and
            compare every site with the module's own code.
        on_change: overrides the config's ``on_change`` (see :class:`veomni_core.OpsConfig`).
        training_logits: overrides the config's ``training_logits``.
        agree: whether all ranks of a distributed job must agree on the plan; False lets this rank bind on its own.
        group: the process group whose ranks bind this model; all ranks without it.
        agreement_timeout: how many seconds ranks wait for one another.

    Returns:
        The binding, with its receipt and :meth:`Binding.undo`.

    Raises:
        BindingError: the model, or a part of it, is bound already; two rules put kernels into one module;
            transformers would replace the kernels again; or ``config`` is a plan, for which there is
            :func:`apply_plan`.
        ConfigError: the config is wrong, or was checked against another registry.
        HostError: this machine has no such ``device``.
        KernelLoadError: a kernel's library fails to import; the model is left as it was.
        ConformanceError: ``verify`` found a kernel that does not compute what its contract says, or a site whose
            results differ from those of its module's own code.
        PlanMismatchError: the ranks' plans differ, or some ranks did not answer in time.
    """
    if isinstance(config, Plan):
        raise BindingError("bind makes the plan itself, from a config; to apply a finished one, call apply_plan")
    ops = OpsConfig.of(config, registry)
    settings = _settings(on_change or ops.on_change, training_logits or ops.training_logits)
    device_type = device_type_of(device)
    _make_ready(model)

    def make() -> Plan:
        return make_plan(model, ops, hardware=ops.registry.detect_hardware(device_type), autocast=autocast)

    plan = agree_on_plan(make, agree=agree, group=group, timeout=agreement_timeout)
    return _apply(model, plan, ops.registry, verify, settings)


def apply_plan(
    model: nn.Module,
    plan: Plan,
    registry: Registry | None = None,
    *,
    verify: bool = False,
    on_change: str = "raise",
    training_logits: str = "deferred",
    agree: bool = True,
    group: Any = None,
    agreement_timeout: float = AGREEMENT_TIMEOUT,
) -> Binding:
    """Put the kernels of a finished plan into this one model. What it runs was decided when it was planned.

    Args:
        model: the model that the plan was made for, or one with the same modules.
        plan: the plan, as of :func:`veomni_core.make_plan`.
        registry: the plugins whose site rules found the plan's sites; discovered without it.
        verify, agree, group, agreement_timeout: as for :func:`bind`.
        on_change, training_logits: as in :class:`veomni_core.OpsConfig`.

    Returns:
        The binding, as of :func:`bind`.

    Raises:
        BindingError: as of :func:`bind`; or ``plan`` is a config, for which there is :func:`bind`.
        KernelLoadError, ConformanceError, PlanMismatchError: as of :func:`bind`.
    """
    if not isinstance(plan, Plan):
        raise BindingError(f"apply_plan needs a Plan, not a {type(plan).__name__}; to plan from a config, call bind")
    settings = _settings(on_change, training_logits)
    _make_ready(model)
    plan = agree_on_plan(lambda: plan, agree=agree, group=group, timeout=agreement_timeout)
    return _apply(model, plan, registry or discover(), verify, settings)


def _apply(model: nn.Module, plan: Plan, registry: Registry, verify: bool, settings: tuple[str, str]) -> Binding:
    """Change the model, once all ranks have the plan."""
    kernels = {planned.spec: planned.spec.load() for planned in plan.kernels}
    verification = Verification()
    if verify:
        if why := misplaced(model, plan):
            raise BindingError(f"verify=True runs the kernels where the model is, but {why}")
        verification = verify_plan(model, plan, registry, kernels)
    changes = ChangeSet(*settings)
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


def _settings(on_change: str, training_logits: str) -> tuple[str, str]:
    return one_of("on_change", on_change, ON_CHANGE), one_of("training_logits", training_logits, TRAINING_LOGITS)


def _make_ready(model: nn.Module) -> None:
    """Raise if the model can't be bound; unbind what was copied into it from another bound model."""
    _refuse_unbindable(model)
    _release_copies(model)


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
    """Unbind modules that were copied from another bound model into this one, before this one is bound."""
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
