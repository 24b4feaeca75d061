"""Groups of parameters that a job names by globs, and which parameter belongs to which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Self

from pydantic import Field, model_validator

from veomni_core.errors import ConfigError, did_you_mean
from veomni_trainer.job.section import Number, Section


class ParameterGroup(Section):
    """Parameters that are optimized otherwise than the rest."""

    match: str = Field(min_length=1)
    """A glob of parameter names, such as ``*.norm.weight``."""
    weight_decay: Annotated[Number, Field(ge=0.0)] | None = None
    """Their weight decay; by default what it is without the group."""
    learning_rate: Annotated[Number, Field(gt=0.0)] | None = None
    """Their highest learning rate; by default ``train.learning_rate``."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.weight_decay is None and self.learning_rate is None:
            raise ValueError("changes nothing; write weight_decay, learning_rate or both")
        return self


def group_of(groups: Sequence[ParameterGroup], name: str) -> int | None:
    """The index of the first group that matches a parameter's name."""
    return next((index for index, group in enumerate(groups) if fnmatchcase(name, group.match)), None)


def check_groups(groups: Sequence[ParameterGroup], names: Iterable[str]) -> None:
    """Raise ConfigError if a group has none of the parameters ``names``, the trained ones.

    A parameter belongs to the first group that matches its name.
    """
    names = list(names)
    owners = [group_of(groups, name) for name in names]
    for index, group in enumerate(groups):
        if index in owners:
            continue
        matched = [name for name in names if fnmatchcase(name, group.match)]
        why = (
            f"every parameter that it matches, such as {matched[0]}, belongs to an earlier group; write this one first"
            if matched
            else f"no trained parameter has such a name. {did_you_mean(group.match, names)}"
        )
        raise ConfigError(f"train.parameter_groups.{index}: match: {group.match!r}: {why}")
