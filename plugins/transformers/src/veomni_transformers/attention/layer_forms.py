"""The form of a layer: what decides which shapes it returns on zeros."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn


def form_of(module: nn.Module, index: int) -> Hashable:
    """The classes, settings and sizes in ``module``, but for its ``index`` in a list of layers."""
    own = {name: value for name, value in vars(module).items() if is_setting(value)}
    settings = tuple(sorted((n, repr(value)) for n, value in own.items() if type(value) is not int or value != index))
    shapes = tuple((name, None if value is None else value.shape) for name, value in module._parameters.items())
    children = tuple((name, None if m is None else form_of(m, index)) for name, m in module._modules.items())
    return type(module), settings, shapes, children, id(vars(module).get("config"))


def is_setting(value: Any) -> bool:
    """Whether ``value`` is a plain one, which is equal to another by what it is."""
    return isinstance(value, bool | int | float | str)
