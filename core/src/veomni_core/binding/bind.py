"""Binds kernels to one model instance, by a config or by a finished plan. Only this step changes the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from veomni_core.binding.application import bound_alone, put_into
from veomni_core.binding.binding import Binding
from veomni_core.binding.placement import device_type_of
from veomni_core.binding.planned_model import refuse_another_model
from veomni_core.binding.ranks import AGREEMENT_TIMEOUT, Ranks
from veomni_core.binding.watched_code import WatchedCode
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.errors import BindingError
from veomni_core.planning.choice import expect
from veomni_core.planning.config import ON_CHANGE, TRAINING_LOGITS, OpsConfig, one_of
from veomni_core.planning.plan import Plan
from veomni_core.planning.planner import make_plan

logger = logging.getLogger(__name__)


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
        BindingError: the model, or a part of it, is bound already or just now; two rules put kernels into one module;
            transformers would replace the kernels again; or ``config`` is a plan, for which there is
            :func:`apply_plan`.
        ConfigError: the config or another argument is wrong, or it was checked against another registry.
        HostError: this machine has no such ``device``.
        KernelUnavailableError: a requested kernel can't run here, or must pass ``veomni verify`` first.
        KernelLoadError: a kernel's library fails to import; the model is left as it was.
        ConformanceError: ``verify`` found a kernel that breaks its contract, or a site that differs from its module's
            own code; or, also without it, no gradient arrives through a kernel that nobody verified here.
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
    settings = _settings(verify, on_change or ops.on_change, training_logits or ops.training_logits)
    device_type = device_type_of(device)

    def make() -> Plan:
        hardware = None if device_type is None else ops.registry.detect_hardware(device_type)
        return make_plan(model, ops, hardware=hardware, autocast=autocast, training=training, batch=batch)

    with bound_alone(model, ops.registry):
        plan = ranks.agree_on(make)
        if device is None:
            _warn_of_an_idle_accelerator(plan, ops.registry)
        return put_into(model, plan, ops.registry, verify, settings, _code_of(plan))


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
    settings = _settings(verify, on_change, training_logits)
    expect(isinstance(registry, Registry | None), "registry", registry, "a Registry, as of discover()")
    registry = registry or (plan.proven.registry if plan.proven else discover())
    code = WatchedCode()

    def checked() -> Plan:
        nonlocal code
        if plan.proven and plan.proven.is_still(model, (each.site for each in plan.decisions), registry):
            code = _code_of(plan)
        else:
            refuse_another_model(model, plan, registry)
        return plan

    with bound_alone(model, registry):
        Ranks(agree, group, agreement_timeout).agree_on(checked)
        return put_into(model, plan, registry, verify, settings, code)


def apply_proven_plan(
    model: nn.Module, plan: Plan, registry: Registry, *, verify: bool, on_change: str, training_logits: str
) -> Binding:
    """As :func:`apply_plan` on this rank alone, where the caller knows that ``plan`` was proven for such a model."""
    with bound_alone(model, registry):
        return put_into(model, plan, registry, verify, _settings(verify, on_change, training_logits), _code_of(plan))


def _code_of(plan: Plan) -> WatchedCode:
    """The code that was read for ``plan``, if this process made it for such a model."""
    return WatchedCode(plan.proven.code if plan.proven else None)


def _settings(verify: bool, on_change: str, training_logits: str) -> tuple[str, str]:
    expect(isinstance(verify, bool), "verify", verify, "True or False")
    return one_of("on_change", on_change, ON_CHANGE), one_of("training_logits", training_logits, TRAINING_LOGITS)


def _warn_of_an_idle_accelerator(plan: Plan, registry: Registry) -> None:
    """A model that is bound on the CPU and moved by a trainer would train without the accelerator's kernels."""
    if plan.hardware.device_type == "cpu" and plan.kernels:
        found = registry.detect_hardware()
        if found.device_type != "cpu":
            message = (
                "the model is on the CPU, so it was bound to kernels of the CPU, and this machine has %s. If the model "
                "will run there, bind it after it was moved, or pass device=%r; if it stays, pass device='cpu'"
            )
            logger.warning(message, found.describe(), found.torch_device_type)
