"""The optimizers that a job can name: transformers' own, and Muon; what they can be told, and their groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from veomni_core.errors import ConfigError, HostError, UnknownNameError, did_you_mean
from veomni_trainer.job.parameter_groups import ParameterGroup, group_of
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.muon import MuonWithAdamW, hidden_matrices
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
        _check_options(train.optimizer_name, AdamW, train.optimizer_options)
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
    _check_options(name, kind, options)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return kind, arguments | values


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


def _check_options(name: str, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    known = {key for key in inspect.signature(kind).parameters if key not in _ELSEWHERE} - {"matrices"}
    for option in options:
        if option in _ELSEWHERE:
            raise ConfigError(f"train.optimizer.{option}: write {_ELSEWHERE[option]}")
        if option not in known:
            raise UnknownNameError(
                f"train.optimizer.{option}: {name} has no such option. {did_you_mean(option, known)}"
            )


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
