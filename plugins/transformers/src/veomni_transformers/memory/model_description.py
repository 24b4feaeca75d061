"""Describes a model by content: models with equal descriptions can't be told apart by the rules that read them."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import deque
from collections.abc import Hashable, Iterable
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from veomni_transformers.attention.interface_names import is_in_use
from veomni_transformers.proving.functions import closure_contents

_AS_IS = frozenset({bool, int, str, bytes, type(None), type(...), torch.dtype, torch.Size, torch.layout})
_BY_REPR = frozenset({float, complex, slice, range, torch.device, torch.memory_format})  # 0.0 equals -0.0
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_TENSORS = (Tensor, nn.Parameter)
_LARGEST_READ = 65536  # elements; of larger tensors the probes copy no values either (`probe.bare_copy`)
_REGISTRIES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
_DESCRIBED = frozenset({"_parameters", "_buffers", "_modules"})


class _Plain:
    """What instances of Python's own classes look like in memory, where none of their state is in C or in slots."""


class Indescribable(Exception):
    """Something in the model has state that can't be compared by content."""


class Description:
    """What is in a model: classes, settings, code set on instances, and the forms of tensors; no weights' values.

    Attributes:
        key: equal for two models if they are described alike, and if the same objects are shared within them. Classes,
            code objects and built-in functions enter it by ``id``, so it counts only while all of ``named`` live.
        named: weak references to these objects.
        code: the classes and functions whose code the model can run.

    Raises:
        Indescribable: by the constructor, where the model holds hooks, tensors of other classes, or objects whose state
            is not in Python.
    """

    def __init__(self, value: Any) -> None:
        self.named: list[ref[Any]] = []
        self.code: dict[int, Any] = {}
        self._numbers: dict[Hashable, int] = {}  # a number for each part: layers repeat theirs
        self._met: dict[int, int] = {}
        self._kept_alive: list[Any] = []  # while ids are compared
        root = self._of(value)
        self.key = (root, tuple(self._numbers))
        del self._met, self._numbers, self._kept_alive

    def __eq__(self, other: object) -> bool:
        """Whether both are of models that can't be told apart, and all that they name by ``id`` still lives."""
        return (
            isinstance(other, Description)
            and self.key == other.key
            and all(each() is not None for each in (*self.named, *other.named))
        )

    __hash__ = None  # type: ignore[assignment]

    def _of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _AS_IS:
            if kind is str and is_in_use(value):  # what it stands for lasts as long as some bound model
                raise Indescribable(f"the attention interface {value} of a bound model")
            return (kind, value)
        if kind in _BY_REPR:
            return (kind, repr(value))
        if kind is tuple:
            return self._numbered("tuple", *map(self._of, value))
        if isinstance(value, type):
            self.code[id(value)] = value
            return ("class", self._named(value))
        if isinstance(value, Enum):
            return ("member", self._of(kind), value.name)
        if isinstance(value, ModuleType):
            self.code[id(value)] = value
            return ("module", self._named(value))
        if isinstance(value, logging.Logger):
            return ("logger", value.name)
        if isinstance(value, BuiltinFunctionType):
            if not isinstance(value.__self__, ModuleType | type | None):
                raise Indescribable(f"a method of a {type(value.__self__).__name__}")
            return ("built in", self._named(value))
        if isinstance(value, MethodType):
            return self._numbered("method", self._of(value.__func__), self._of(value.__self__))
        if id(value) in self._met:  # objects that can change: whether they are shared is part of what they are
            return ("met before", self._met[id(value)])
        self._met[id(value)] = len(self._met)
        self._kept_alive.append(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, partial):
            return self._numbered(self._of(kind), *map(self._of, (value.func, value.args, value.keywords, vars(value))))
        if isinstance(value, _CONTAINERS):
            return self._container(value)
        if (kind.__basicsize__, kind.__dictoffset__) != (_Plain.__basicsize__, _Plain.__dictoffset__):
            raise Indescribable(f"a {kind.__name__}, whose state is not in its attributes alone")
        return self._numbered(self._of(kind), *self._attributes(value))

    def _container(self, value: Any) -> Hashable:
        kind = type(value)
        if any(vars(base).get("__slots__") for base in kind.__mro__):
            raise Indescribable(f"a {kind.__name__}, which has slots")
        flat = [each for pair in dict.items(value) for each in pair] if isinstance(value, dict) else value
        items = [self._of(each) for each in flat]
        items = sorted(items, key=repr) if isinstance(value, set | frozenset) else items
        settings = [self._of(getattr(value, name, None)) for name in ("default_factory", "maxlen")]
        return self._numbered(self._of(kind), *settings, *items, "and", *self._attributes(value))

    def _attributes(self, value: Any) -> Iterable[Hashable]:
        own = getattr(value, "__dict__", None)
        return [each for name, inner in own.items() for each in (name, self._of(inner))] if own else ()

    def _module(self, module: nn.Module) -> Hashable:
        parts: list[Hashable] = [self._of(type(module))]
        for name, value in vars(module).items():
            if name not in _REGISTRIES:
                parts += (name, self._of(value))
            elif name == "_non_persistent_buffers_set":
                parts += (name, *sorted(value))
            elif value and name not in _DESCRIBED:
                raise Indescribable(f"{type(module).__name__} has {name}")
            elif value:
                parts.append(name)
                for inner, each in value.items():
                    parts += (inner, self._of(each))
        return self._numbered(*parts)

    def _tensor(self, tensor: Tensor) -> Hashable:
        if type(tensor) not in _TENSORS:
            raise Indescribable(f"a tensor of the class {type(tensor).__name__}")
        if tensor._backward_hooks:
            raise Indescribable("a tensor with hooks")
        freed = tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
        form = (tensor.shape, tensor.dtype, tensor.device.type, tensor.layout, tensor.requires_grad, freed)
        values = b""
        if type(tensor) is not nn.Parameter and not tensor.is_meta and tensor.numel() <= _LARGEST_READ:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            values = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).digest()
        return self._numbered(type(tensor).__name__, form, values, *self._attributes(tensor))

    def _function(self, function: FunctionType) -> Hashable:
        home = function.__globals__.get("__name__")
        if not isinstance(home, str) or vars(sys.modules.get(home, object)) is not function.__globals__:
            raise Indescribable(f"{function.__qualname__}, whose globals are those of no module")
        self.code[id(function)] = function
        kept = (function.__defaults__, function.__kwdefaults__, tuple(closure_contents(function)), vars(function))
        return self._numbered("function", home, self._named(function.__code__), *map(self._of, kept))

    def _named(self, value: Any) -> int:
        self.named.append(ref(value))
        return id(value)

    def _numbered(self, *parts: Hashable) -> Hashable:
        return ("part", self._numbers.setdefault(parts, len(self._numbers)))
