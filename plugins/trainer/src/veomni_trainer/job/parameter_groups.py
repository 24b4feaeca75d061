"""Groups of parameters that a job names by globs, and which parameter belongs to which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from veomni_core.errors import ConfigError, did_you_mean
from veomni_trainer.job.section import Number, Section

Tower = Literal["vision", "audio", "projector"]


class ParameterGroup(Section):
    """Parameters that are optimized otherwise than the rest."""

    match: str | None = Field(default=None, min_length=1)
    """A glob of parameter names, such as ``*.norm.weight``."""
    tower: Tower | None = None
    """In place of a glob: all parameters of this part of a model of images, video or audio."""
    weight_decay: Annotated[Number, Field(ge=0.0)] | None = None
    """Their weight decay; by default what it is without the group."""
    learning_rate: Annotated[Number, Field(gt=0.0)] | None = None
    """Their highest learning rate; by default ``train.learning_rate``."""

    @property
    def named(self) -> str:
        """What it names, as in the job."""
        return f"tower: {self.tower}" if self.match is None else f"match: {self.match!r}"

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if (self.match is None) == (self.tower is None):
            raise ValueError("needs either match, a glob of parameter names, or tower")
        if self.weight_decay is None and self.learning_rate is None:
            raise ValueError("changes nothing; write weight_decay, learning_rate or both")
        return self


def matches(group: ParameterGroup, name: str, tower: str = "") -> bool:
    """Whether the parameter ``name``, which is in ``tower``, is one of the group's."""
    return group.tower == tower if group.match is None else fnmatchcase(name, group.match)


def group_of(groups: Sequence[ParameterGroup], name: str, tower: str = "") -> int | None:
    """The index of the first group that a parameter belongs to."""
    return next((index for index, group in enumerate(groups) if matches(group, name, tower)), None)


def check_groups(groups: Sequence[ParameterGroup], towers: Mapping[str, str]) -> None:
    """Raise ConfigError if a group has none of the trained parameters, whose names ``towers`` maps to their tower.

    A parameter belongs to the first group that matches its name.
    """
    names = list(towers)
    owners = [group_of(groups, name, tower) for name, tower in towers.items()]
    for index, group in enumerate(groups):
        if index in owners:
            continue
        matched = [name for name, tower in towers.items() if matches(group, name, tower)]
        why = (
            f"every parameter that it matches, such as {matched[0]}, belongs to an earlier group; write this one first"
            if matched
            else f"no trained parameter has such a name. {did_you_mean(group.match, names)}"
            if group.match is not None
            else "the model has no such tower that is trained"
        )
        raise ConfigError(f"train.parameter_groups.{index}: {group.named}: {why}")
