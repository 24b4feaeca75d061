"""Divides an optimizer's parameters into the groups that a job names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from veomni_trainer.job.parameter_groups import ParameterGroup, group_of
from veomni_transformers.towers.parts import tower_of, towers


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
