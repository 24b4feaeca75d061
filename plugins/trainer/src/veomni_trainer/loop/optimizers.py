"""The optimizers and schedules that a job can name: transformers' own, and Muon beside AdamW."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from veomni_core.commands import shown
from veomni_core.errors import ConfigError, HostError, UnknownNameError, did_you_mean
from veomni_trainer.job.parameter_groups import ParameterGroup, group_of
from veomni_trainer.job.train_section import TrainSection
from veomni_transformers.towers.parts import tower_of, towers

MUON = "muon"
_TORCH_ADAMW = ("adamw_torch", "adamw_torch_fused")  # what a job leaves to the machine is one of them
_REFUSED = {  # by the start of the name
    "galore": "needs a choice of modules, and optimizes layer by layer",
    "apollo": "needs a choice of modules, and optimizes layer by layer",
    "lomo": "updates weights during the backward, before gradients are accumulated or clipped",
    "adalomo": "updates weights during the backward, before gradients are accumulated or clipped",
    "schedule_free": "trains other weights than it evaluates and saves, so a resumed run would not go on exactly",
    "adamw_anyprecision": "is part of torchdistx, which is no longer maintained",
    "adamw_torch_xla": "needs torch_xla, for which there is no device here",
}
_ELSEWHERE = {"lr": "train.learning_rate", "weight_decay": "train.weight_decay", "params": "train.parameter_groups"}
_NOT_OPTIONS = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
_WITHOUT_OPTIONS = ("constant", "cosine", "linear")  # made with none, and always there
_BY_VALIDATION = ("reduce_lr_on_plateau", "greedy")


def optimizer_names() -> list[str]:
    """Every name that ``train.optimizer`` takes."""
    from transformers.training_args import OptimizerNames

    return sorted([MUON, *(name.value for name in OptimizerNames if _refusal(name.value) is None)])


def check_optimizer(train: TrainSection) -> None:
    """Check, without a model, that the job's optimizer exists, can be used here and takes the options it is given.

    Raises:
        ConfigError: there is no such optimizer or option, or the trainer can't train with it.
        HostError: the optimizer needs a package that isn't installed.
    """
    # Known without transformers' Trainer, whose import takes seconds that `veomni plan` needn't spend.
    if train.optimizer_name in _TORCH_ADAMW:
        _checked_options(train.optimizer_name, AdamW, train.optimizer_options, {"lr": train.learning_rate})
    else:
        _described(train)


def optimizer_for(train: TrainSection, model: nn.Module) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer's class and its arguments, as transformers' ``Trainer`` takes them.

    Raises:
        VeOmniError: as :func:`check_optimizer`.
    """
    kind, arguments = _described(train)
    if kind is MuonWithAdamW:
        arguments["matrices"] = hidden_matrices(model)
    return kind, arguments


def _described(train: TrainSection) -> tuple[type[Optimizer], dict[str, Any]]:
    name, options = train.optimizer_name, train.optimizer_options
    assert name is not None
    if name == MUON:
        kind, arguments = MuonWithAdamW, {"lr": train.learning_rate}
    else:
        kind, arguments = _of_transformers(name, train.learning_rate)
    return kind, arguments | _checked_options(name, kind, options, arguments)


def _of_transformers(name: str, learning_rate: float) -> tuple[Any, dict[str, Any]]:
    if why := _refusal(name):
        raise ConfigError(f"train.optimizer: {name} {why}. Write another one, such as adamw_torch_fused or muon")
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    if name not in optimizer_names():
        raise UnknownNameError(f"train.optimizer: {name!r} is unknown. {did_you_mean(name, optimizer_names())}")
    defaults = SimpleNamespace(  # those fields of TrainingArguments that are read, with its defaults
        optim=OptimizerNames(name),
        optim_args=None,
        learning_rate=learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
    )
    try:
        return Trainer.get_optimizer_cls_and_kwargs(defaults)  # type: ignore[arg-type]
    except (ImportError, ValueError) as error:
        raise HostError(f"train.optimizer: {name} can't be used here: {error}") from error


def _checked_options(
    name: str, kind: type[Optimizer], options: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, Any]:
    """The options as the optimizer takes them beside ``others``; it is made with them, of one small weight."""
    if elsewhere := [option for option in options if option in _ELSEWHERE]:
        raise ConfigError(f"train.optimizer.{elsewhere[0]}: write {_ELSEWHERE[elsewhere[0]]}")
    known = inspect.signature(kind).parameters
    _refuse_unknown("train.optimizer", name, options, {*known} - {*_ELSEWHERE, "matrices"})
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    for key, value in values.items():
        usual = known[key].default
        if isinstance(usual, (bool, str)) and type(value) is not type(usual):
            raise ConfigError(f"train.optimizer.{key}: {name} takes such as {usual!r} for it, got {shown(value)}")
    if values:
        try:
            kind([{"params": [nn.Parameter(torch.zeros(2, 2))]}], **{**others, **values})  # type: ignore[call-arg, arg-type]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"train.optimizer: {name} can't be made with these options: {error}") from error
    return values


def _refuse_unknown(key: str, name: str, options: Iterable[str], known: Collection[str]) -> None:
    for option in options:
        if option not in known:
            raise UnknownNameError(f"{key}.{option}: {name} has no such option. {did_you_mean(option, known)}")


def _refusal(name: str) -> str | None:
    return next((why for start, why in _REFUSED.items() if name.startswith(start)), None)


def divide(optimizer: Optimizer, model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Move the parameters of each of ``groups`` out of the optimizer's groups, into groups of their own behind these.

    The new groups name their glob or tower in ``match``. The optimizer must have made no step, and have no schedule.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = towers(model) if any(group.tower for group in groups) else {}
    divided = []
    for whole in optimizer.param_groups:
        parts: dict[int | None, list[nn.Parameter]] = {}
        for parameter in whole["params"]:
            name = names[id(parameter)]
            parts.setdefault(group_of(groups, name, tower_of(found, name)), []).append(parameter)
        whole["params"] = parts.pop(None, [])
        for index, parameters in sorted(parts.items(), key=lambda part: part[0] or 0):
            group = groups[index]  # type: ignore[index]
            changed = {"lr": group.learning_rate, "weight_decay": group.weight_decay}
            said = {key: value for key, value in changed.items() if value is not None}
            divided.append(whole | {"params": parameters, "match": group.match or group.named} | said)
    optimizer.param_groups += divided


def hidden_matrices(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters that Muon optimizes: those of two dimensions that are neither embeddings nor the head.

    Norms and biases have one dimension, and all experts of a layer that lie in one tensor have three.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outside = {
        id(weight) for module in [*tables, *([head] if head is not None else [])] for weight in module.parameters()
    }
    return frozenset(id(weight) for weight in model.parameters() if weight.ndim == 2 and id(weight) not in outside)


class MuonWithAdamW(Optimizer):
    """torch's ``Muon`` on the hidden matrices, and torch's ``AdamW`` on the rest.

    Both read this optimizer's groups and write into its state, so schedules and checkpoints treat it as one optimizer.
    Each group says in ``algorithm`` which of the two has it.

    Args:
        groups: parameters with their weight decay, as ``Trainer`` groups them.
        lr: the learning rate of both.
        matrices: the ids of the parameters that Muon optimizes.
        momentum: Muon's.
        nesterov: whether Muon's momentum is Nesterov's.
        ns_coefficients: of Muon's Newton-Schulz iteration.
        ns_steps: how many of those iterations a step takes.
        adjust_lr_fn: how Muon scales a matrix's update. By default like AdamW's, so that one
            learning rate fits both.
        betas: AdamW's.
        eps: AdamW's.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        matrices: Collection[int] = (),
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        hidden, others = [], []
        for group in params:
            hidden.append({**group, "params": [p for p in group["params"] if id(p) in matrices]})
            others.append({**group, "params": [p for p in group["params"] if id(p) not in matrices]})
        self._muon = Muon(
            hidden,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        self._adamw = AdamW(others, lr, betas=betas, eps=eps)
        groups = [group | {"algorithm": "muon"} for group in self._muon.param_groups]
        groups += [group | {"algorithm": "adamw"} for group in self._adamw.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in (("muon", self._muon), ("adamw", self._adamw)):
            # Anew in each step: loading a checkpoint replaces groups and state, and a job's groups divide them further.
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state
            part.step()
        return loss


def schedule_names() -> list[str]:
    """Every name that ``train.schedule`` takes."""
    from transformers import SchedulerType

    return sorted(kind.value for kind in SchedulerType if kind.value not in _BY_VALIDATION)


def check_schedule(train: TrainSection) -> None:
    """Check that the job's schedule exists and can be made with its options.

    Raises:
        ConfigError: there is no such schedule or option, or an option is missing or has a wrong value.
    """
    # Known without transformers' optimization, which imports PEFT: seconds that `veomni plan` needn't spend.
    if train.schedule in _WITHOUT_OPTIONS and not train.schedule_options:
        return
    if train.schedule in _BY_VALIDATION:
        raise ConfigError(
            f"train.schedule: {train.schedule} goes by the validation loss instead of the steps, and `veomni train` "
            "has only schedules that go by the steps. Write another one, such as cosine, and train.early_stop"
        )
    if train.schedule not in schedule_names():
        raise UnknownNameError(
            f"train.schedule: {train.schedule!r} is unknown. {did_you_mean(train.schedule, schedule_names())}"
        )
    from transformers import SchedulerType, get_scheduler
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    kind = SchedulerType(train.scheduler_type)
    schedule: Any = TYPE_TO_SCHEDULER_FUNCTION[kind]
    known = {*inspect.signature(schedule).parameters} - _NOT_OPTIONS
    _refuse_unknown("train.schedule_options", train.schedule, train.schedule_options, known)
    steps = train.steps or 100  # of a job in epochs, not known yet
    warmup = train.warmup if train.warmup >= 1 else math.ceil(steps * train.warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=train.learning_rate)
    try:
        get_scheduler(kind, optimizer, int(warmup), steps, train.schedule_options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.schedule_options: {train.schedule} can't be made of them: {error}") from error
