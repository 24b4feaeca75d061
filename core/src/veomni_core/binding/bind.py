"""Applies a plan to one model instance and undoes it. Only this step changes the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from veomni_core.binding.evaluation import loaded
from veomni_core.binding.model_rules import ModelRules
from veomni_core.binding.placement import device_type_of, misplaced, planned_elsewhere
from veomni_core.binding.planned_model import refuse_another_model, sites_of
from veomni_core.binding.ranks import AGREEMENT_TIMEOUT, Ranks
from veomni_core.binding.receipt import Receipt, Verification, kernels_line
from veomni_core.binding.site_changes import Kernels, site_changes
from veomni_core.binding.unverified import refuse_unverified
from veomni_core.binding.watched_code import WatchedCode, look_when_training_starts
from veomni_core.changes.bound_classes import run_eager
from veomni_core.changes.bound_subclass import bindings_in
from veomni_core.changes.change import Change
from veomni_core.changes.change_set import ChangeSet
from veomni_core.changes.transformation import Transformation, transformations_of
from veomni_core.descriptions.references import load_from
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError
from veomni_core.planning.config import ON_CHANGE, TRAINING_LOGITS, OpsConfig, one_of
from veomni_core.planning.plan import Plan
from veomni_core.planning.planner import make_plan
from veomni_core.sites.walk import named_modules

logger = logging.getLogger(__name__)
_VERIFY_PLAN = "veomni_conformance.bound_models.verification:verify_plan"


class Binding(Transformation):
    """A plan that is applied to one model. Used as a context manager, it calls :meth:`undo` on exit.

    Attributes:
        plan: the :class:`~veomni_core.planning.plan.Plan` that was applied.
        verification: what ``verify=True`` checked; empty without it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> with bind(model, {"preset": "eager", "swiglu_mlp_implementation": "torch"}, device="cpu") as binding:
        ...     binding
        <Binding of LlamaForCausalLM on cpu (CPU): swiglu_mlp/standard:torch at 2 sites; 9 sites eager>
        >>> binding
        <Binding, not in force: swiglu_mlp/standard:torch at 2 sites; 9 sites eager>
    """

    name = "binding"

    def __init__(
        self, model: nn.Module, plan: Plan, changes: ChangeSet, verification: Verification, code: WatchedCode
    ) -> None:
        super().__init__(model, changes)
        changes.classes.binding = self
        self.plan, self.verification = plan, verification
        self._code = code

    def __repr__(self) -> str:
        """What is bound where, in one line."""
        where = f" of {type(self.model).__name__} on {self.plan.conditions}" if self.active else ", not in force"
        return f"<Binding{where}: {kernels_line(self.plan)}>"

    def describe(self) -> str:
        """For receipts: ``plan 4f2a91c07d3e for NVIDIA H200``."""
        return f"plan {self.plan.sha256[:12]} for {self.plan.conditions}"

    def changes_made_at(self, path: str, owner: str) -> tuple[Change, ...]:
        """The changes that ``owner`` (a rule and the field that chose for it) made at the module path ``path``."""
        return self._changes.made_at(path, owner)

    def overridden(self, changes: Iterable[Change]) -> str:
        """How other code has overridden one of ``changes`` since, as a phrase; empty if it has overridden none."""
        outermost = (change for change in changes if self._changes.is_outermost(change))
        return next(filter(None, (change.overridden() for change in outermost)), "")

    def changed(self) -> dict[str, str]:
        found = super().changed()
        for path, what in self.look_at_code().items():
            found[path] = f"{found[path]}; {what}" if path in found else what
        return found

    def look_at_code(self) -> dict[str, str]:
        """By module path, the code that was replaced since bind, and that the proof of a bound site there had read.

        So are settings that were written past the guard. Each of them is a
        :class:`~veomni_core.errors.CodeChangedWarning`, once. ``model.train()`` calls this.
        """
        if not self.active:
            return {}
        found = self._code.changed()
        if written := dict(self._changes.written()):
            self._code.warn_of_settings(written)
            found |= {path: f"{found[path]}; {what}" if path in found else what for path, what in written.items()}
        return found

    @property
    def receipt(self) -> Receipt:
        """What runs now: the plan, the model's transformations, and what other code has changed since."""
        model = self._model()
        applied = () if model is None else transformations_of(model)
        reasons: dict[str, dict[str, None]] = {}
        for each in dict.fromkeys((self, *applied)):
            for path, reason in each.changed().items():
                reasons.setdefault(path, {})[reason] = None
        return Receipt(
            self.plan,
            self.verification,
            tuple((each.name, each.describe()) for each in applied),
            {path: "; ".join(all_reasons) for path, all_reasons in reasons.items()},
            "" if model is None else misplaced(model, self.plan) or planned_elsewhere(model, self.plan),
            dict(self._changes.never_called()),
        )


def binding_of(model: nn.Module) -> Binding | None:
    """The binding whose kernels run in ``model``, or ``None``.

    Args:
        model: the bound model, a wrapper around it, one of its submodules, or a copy of a submodule.

    Returns:
        The binding, or ``None`` if the model runs its own code.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> binding_of(model) is None
        True
        >>> binding = bind(model, {"preset": "eager", "swiglu_mlp_implementation": "torch"}, device="cpu")
        >>> binding_of(model) is binding, binding_of(model.model.layers[1].mlp) is binding
        (True, True)
    """
    for module in model.modules():
        for each in transformations_of(module):
            if isinstance(each, Binding):
                return each
    return next((made.binding for module in model.modules() for made in bindings_in(module)), None)


def bind(
    model: nn.Module,
    config: OpsConfig | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    autocast: Any = None,
    device: Any = None,
    training: bool = True,
    verify: bool = False,
    on_change: str | None = None,
    training_logits: str | None = None,
    batch: tuple[int, int] | None = None,
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
        device: where the model will run. Without it, where it is: a model on the CPU gets kernels of the CPU. If it
            will be moved to the accelerator later, as ``Trainer`` does, say so: ``device="cuda"``. A model on the meta
            device is planned for the machine's accelerator.
        training: False binds for evaluation only, with kernels that have no backward too. Such a kernel raises where
            gradients are recorded.
        verify: first run every chosen kernel through its op's contract, on the model's device and in its dtype, and
            compare every site with the module's own code.
        on_change: overrides the config's ``on_change`` (see :class:`veomni_core.OpsConfig`).
        training_logits: overrides the config's ``training_logits``.
        batch: the sequences of a step on one device, and their length: ``auto`` then goes by what ``veomni tune``
            measured of such steps, as of :func:`veomni_core.make_plan`.
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
        KernelUnavailableError: a requested kernel can't run here, or must pass ``veomni verify`` first.
        KernelLoadError: a kernel's library fails to import; the model is left as it was.
        ConformanceError: ``verify`` found a kernel that does not compute what its contract says, or a site whose
            results differ from those of its module's own code.
        PlanMismatchError: the ranks' plans differ, or some ranks did not answer in time.
        LockMismatchError: ``VEOMNI_FROZEN`` is set, and what is installed differs from that lock file.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model, ids = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64)), torch.tensor([[5, 9, 17, 3]])
        >>> eager = model(ids, labels=ids).loss
        >>> binding = bind(model, {"preset": "eager", "rms_norm_implementation": "torch"}, device="cpu")
        >>> [str(planned.spec) for planned in binding.plan.kernels]
        ['rms_norm/standard:torch']
        >>> torch.testing.assert_close(model(ids, labels=ids).loss, eager)
        >>> binding.undo()
        >>> torch.equal(model(ids, labels=ids).loss, eager)  # bit for bit
        True
        >>> bind(model, {"preset": "eager", "rms_norm_implementation": "tirton"})
        Traceback (most recent call last):
            ...
        veomni_core.errors.UnknownNameError: rms_norm_implementation: 'tirton' is unknown. Did you mean 'triton'?
    """
    if isinstance(config, Plan):
        raise BindingError("bind makes the plan itself, from a config; to apply a finished one, call apply_plan")
    ranks = Ranks(agree, group, agreement_timeout)
    with ranks.refused_together():
        ops = OpsConfig.of(config, registry)
    settings = _settings(on_change or ops.on_change, training_logits or ops.training_logits)
    device_type = device_type_of(device)
    _make_ready(model, ops.registry)

    def make() -> Plan:
        hardware = None if device_type is None else ops.registry.detect_hardware(device_type)
        return make_plan(model, ops, hardware=hardware, autocast=autocast, training=training, batch=batch)

    plan = ranks.agree_on(make)
    if device is None:
        _warn_of_an_idle_accelerator(plan, ops.registry)
    return _apply(model, plan, ops.registry, verify, settings, _code_of(plan))


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
    """Put the kernels of a finished plan into this one model. The plan has decided what runs.

    Args:
        model: the model that the plan was made for, on any device, or one in which the same is proven at each site.
        plan: the plan, e.g. from :func:`veomni_core.make_plan`.
        registry: the plugins whose site rules found the plan's sites; without it, those that made the plan in this
            process, or those that are discovered.
        verify, agree, group, agreement_timeout: as for :func:`bind`.
        on_change, training_logits: as in :class:`veomni_core.OpsConfig`.

    Returns:
        The binding, as :func:`bind` returns it.

    Raises:
        PlanForAnotherModelError: the model's sites are not those of the plan; the message names them. The model is
            left as it was.
        BindingError: as for :func:`bind`; or ``plan`` is a config: pass that to :func:`bind`.
        KernelUnavailableError, KernelLoadError, ConformanceError, PlanMismatchError: as of :func:`bind`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from veomni_core import make_plan
        >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64))
        >>> plan = make_plan(model, {"preset": "eager", "rms_norm_implementation": "torch"}, hardware="cpu")
        >>> with apply_plan(model, plan) as binding:
        ...     binding.plan.sha256 == plan.sha256, binding.active
        (True, True)
        >>> binding.active
        False
    """
    if not isinstance(plan, Plan):
        raise BindingError(f"apply_plan needs a Plan, not a {type(plan).__name__}; to plan from a config, call bind")
    settings = _settings(on_change, training_logits)
    registry = registry or (plan.proven.registry if plan.proven else discover())
    _make_ready(model, registry)
    code = WatchedCode()

    def checked() -> Plan:
        nonlocal code
        if plan.proven and plan.proven.is_still(model, sites_of(plan), registry):
            code = _code_of(plan)
        else:
            refuse_another_model(model, plan, registry)
        return plan

    Ranks(agree, group, agreement_timeout).agree_on(checked)
    return _apply(model, plan, registry, verify, settings, code)


def apply_proven_plan(
    model: nn.Module, plan: Plan, registry: Registry, *, verify: bool, on_change: str, training_logits: str
) -> Binding:
    """As :func:`apply_plan` on this rank alone, where the caller knows that ``plan`` was proven for such a model."""
    _make_ready(model, registry)
    return _apply(model, plan, registry, verify, _settings(on_change, training_logits), _code_of(plan))


def _code_of(plan: Plan) -> WatchedCode:
    """The code that was read for ``plan``, if this process made it for such a model."""
    return WatchedCode(plan.proven.code if plan.proven else None)


def _apply(
    model: nn.Module, plan: Plan, registry: Registry, verify: bool, settings: tuple[str, str], code: WatchedCode
) -> Binding:
    """Change the model, once all ranks have the plan. ``code`` has what was read of it, or nothing."""
    if not verify:
        refuse_unverified(plan, registry)
    kernels = {planned.spec: loaded(planned.spec) for planned in plan.kernels}
    verification = Verification()
    if verify:
        if why := misplaced(model, plan):
            raise BindingError(f"verify=True runs the kernels where the model is, but {why}")
        verification = _verify_plan()(model, plan, registry, kernels)
    binding = Binding(model, plan, ChangeSet(*settings), verification, code)
    binding.apply(_changes(model, plan, registry, kernels, code))
    _warn_of_sites_left_eager(plan)
    return binding


def _verify_plan() -> Callable[[nn.Module, Plan, Registry, Kernels], Verification]:
    """The checks of ``verify=True``, imported when they are wanted: they are a third of what ``bind`` would load."""
    try:
        return load_from(_VERIFY_PLAN)  # type: ignore[no-any-return]
    except ImportError as error:
        raise BindingError(f"verify=True checks the kernels, and {error}") from error


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


def _settings(on_change: str, training_logits: str) -> tuple[str, str]:
    return one_of("on_change", on_change, ON_CHANGE), one_of("training_logits", training_logits, TRAINING_LOGITS)


def _make_ready(model: nn.Module, registry: Registry) -> None:
    """Raise if the model can't be bound. Unbind modules that were copied into it from another bound model."""
    _refuse_unbindable(model)
    rules = ModelRules(registry)
    for rule in rules:
        rule.refuse(model)
    _release_copies(model)
    for rule in rules:
        rule.release(model)


def _refuse_unbindable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise BindingError(f"bind needs a torch.nn.Module, not a {type(model).__name__}")
    for _, module in named_modules(model):
        paths = [classes.paths[module] for classes in bindings_in(module) if module in classes.paths]
        if paths or any(isinstance(each, Binding) for each in transformations_of(module)):
            raise BindingError(
                f"this model is bound already ({paths[0] if paths else 'the model'}): call binding_of(model).undo() "
                "first"
            )


def _release_copies(model: nn.Module) -> None:
    """Unbind modules that were copied from another bound model into this one, before this one is bound."""
    for _, module in named_modules(model):
        if any(bindings_in(module)):
            run_eager(module)


def _warn_of_an_idle_accelerator(plan: Plan, registry: Registry) -> None:
    """A model that is bound on the CPU and moved by a trainer would train without the accelerator's kernels."""
    if plan.hardware.device_type == "cpu" and plan.kernels:
        found = registry.detect_hardware()
        if found.device_type != "cpu":
            there = found.torch_device_type
            logger.warning(
                "the model is on the CPU, so it was bound to kernels of the CPU, and this machine has %s. If the model "
                "will run there, bind it after it was moved, or pass device=%r; if it stays, pass device='cpu'",
                found.describe(),
                there,
            )


def _warn_of_sites_left_eager(plan: Plan) -> None:
    for op in plan.ops:
        uncovered = [decision for decision in op.left_eager if not decision.as_asked and op.asked != "auto"]
        if uncovered:
            reasons = "; ".join(dict.fromkeys(decision.reason for decision in uncovered))
            logger.warning("%s: %d of %d sites stay eager: %s", op.config_field, len(uncovered), len(op.sites), reasons)
