"""Whether two models in one process differ in nothing but where their tensors are, and what these hold."""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from veomni_core.sites.walk import named_modules
from veomni_transformers.proving.functions import closure_contents

_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)
_AS_IS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
# Of configs and models: where weights were read from, by what, and in which mode. No proof reads it.
_SET_BY_LOADING = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"}
    | {"training", "_is_hf_initialized", "_use_kernels", "_weight_conversions"}
)


def same_form(one: nn.Module, other: nn.Module) -> bool:
    """Whether a proof of ``one``, on the meta device, is one of ``other``: their modules and settings are equal.

    What can't be compared counts as different.

    Example:
        >>> with torch.device("meta"):
        ...     skeleton = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
        >>> model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
        >>> same_form(skeleton, model)
        True
        >>> model[0].eps = 0.1
        >>> same_form(skeleton, model)
        False
    """
    mine, theirs = named_modules(one), named_modules(other)
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return False
    met = {id(a): b for (_, a), (_, b) in zip(mine, theirs, strict=True)}
    return all(_same_module(a, b, met) for (_, a), (_, b) in zip(mine, theirs, strict=True))


def _same_module(one: nn.Module, other: nn.Module, met: dict[int, Any]) -> bool:
    if type(one) is not type(other) or (vars(one).keys() ^ vars(other).keys()) - _SET_BY_LOADING:
        return False
    for name in vars(one).keys() - _SET_BY_LOADING - {"_modules"}:
        mine, theirs = vars(one)[name], vars(other)[name]
        if name in _HOOKS:
            if mine or theirs:
                return False
        elif not _same(mine, theirs, met):
            return False
    return True


def _same(one: Any, other: Any, met: dict[int, Any]) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (type, BuiltinFunctionType)):
        return False
    if isinstance(one, _AS_IS):
        return repr(one) == repr(other)
    if isinstance(one, tuple):  # some are made here, so that their ids don't last
        return len(one) == len(other) and all(_same(a, b, met) for a, b in zip(one, other, strict=True))
    if id(one) in met:
        return met[id(one)] is other
    met[id(one)] = other
    if isinstance(one, Tensor):
        return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
    if isinstance(one, list):
        return len(one) == len(other) and all(_same(a, b, met) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        known = one.keys() - _SET_BY_LOADING
        return known == other.keys() - _SET_BY_LOADING and all(_same(one[key], other[key], met) for key in known)
    if isinstance(one, (set, frozenset)):
        return one == other
    if isinstance(one, FunctionType):
        closed = [*closure_contents(one)], [*closure_contents(other)]
        return one.__code__ is other.__code__ and _same((*closed[0], vars(one)), (*closed[1], vars(other)), met)
    if isinstance(one, MethodType):
        return _same((one.__func__, one.__self__), (other.__func__, other.__self__), met)
    if isinstance(one, partial):
        return _same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords), met)
    if isinstance(one, GenerationConfig):  # no forward reads it
        return True
    return isinstance(one, PretrainedConfig) and _same(vars(one), vars(other), met)
