"""What stands in the namespaces that a model's code and the rules' can read, so that a later patch is seen.

Only weak references are kept of the objects there. Not read: the state of objects that are implemented in C, and what
lies more than four objects beneath a namespace.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

from torch import nn

from veomni_transformers.attention.interface_names import is_in_use
from veomni_transformers.proving.functions import closure_contents
from veomni_transformers.proving.reachable_code import nested_code

_IMPORT, _EXTENDED = dis.opmap["IMPORT_NAME"], dis.opmap["EXTENDED_ARG"]
_DEEPEST = 4
# Immutable, so that the same object is the same value; only these are kept themselves.
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), CodeType})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_NAMESPACES = (ModuleType, type, FunctionType)  # read whole, however deep they are
_CODE = (FunctionType, BuiltinFunctionType, type, property, staticmethod, classmethod)
# Noted where they are named, and not followed: what the proofs take as fixed (`reachable_code`), and a library whose
# state changes with each trainer and whose code runs in a forward only where it was set on an instance.
_NOT_FOLLOWED = frozenset({"torch", "numpy", "accelerate", *sys.stdlib_module_names})
# Of the libraries' objects only these are looked into; their others are caches, locks, logs and descriptions.
_OPENED = (OrderedDict, defaultdict, deque, nn.Module)
# Not looked at, since no forward computes with it. In order: what Python keeps of a module's import and warnings, of
# documentation, and of pickling and subclasses; transformers' table of the classes whose outputs can be recorded, which
# repeats what the classes say, its cache of how checkpoints are read, and its method that initializes weights; our
# own memory.
_IGNORED = frozenset(
    [
        *["__builtins__", "__cached__", "__file__", "__loader__", "__path__", "__spec__", "__warningregistry__"],
        *["__annotations__", "__annotations_cache__", "__dict__", "__doc__", "__weakref__"],
        *["__slotnames__", "_abc_impl"],
        *["_CAN_RECORD_REGISTRY", "_checkpoint_conversion_mapping_cache", "smart_apply"],
        *["_remembered_places", "_remembered_sites"],
    ]
)
# What a package of transformers has to import its names with, once they are asked for.
_LAZY = frozenset(
    ("__all__", "_class_to_module", "_import_structure", "_modules", "_object_missing_backend", "_objects")
)
# The choice of a class by a config: a model has made it.
_AUTO = "transformers.models.auto."
_ANYTHING = object()
_Cached = type(functools.lru_cache(len))


class CodeSnapshot:
    """The namespaces of modules and classes, followed from ``roots`` through the values in them.

    Followed are the packages of the roots, and those that use torch. In others, and in torch, NumPy and the standard
    library, those functions and classes are noted that the followed code names, and they are not followed further.

    Args:
        roots: classes, functions and modules.

    Example:
        >>> class Scale:
        ...     def forward(self, x):
        ...         return x * 2
        >>> snapshot = CodeSnapshot([Scale])
        >>> snapshot.holds()
        True
        >>> Scale.forward = lambda self, x: x * 3
        >>> snapshot.holds()
        False
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        roots = list(roots)
        self._environment = _environment()
        self._modules: dict[str, ref[Any]] = {}
        self._spaces: list[_Space] = []
        self._functions: list[tuple[ref[Any], CodeType, list[Any]]] = []
        self._plain_functions: list[Any] = []  # a reference, a code and the defaults of each, one after the other
        # How deep an object was seen, by its id: it is read again where it is less so. There are no tuples here and in
        # what is kept: tens of thousands have the garbage collector walk through all that the process has.
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # what has the ids
        self._chained: dict[str, list[tuple[str, str]]] = {}
        self._waiting: deque[tuple[Any, int]] = deque()
        self._names: set[str] = set()
        self._followed = {_package(_home(root)) for root in roots} | {
            _package(name)
            for name, module in list(sys.modules.items())
            if not _NAMES_OF_TORCH.isdisjoint(_vars(module))
        }
        self._followed -= _NOT_FOLLOWED
        for root in roots:
            self._expected(root, 0)
        while self._waiting:
            self._read(*self._waiting.popleft())
            if not self._waiting:
                self._find_chained()
        for name, module in self._modules.items():
            if not self._is_followed(name):
                self._space(module(), partial(_some, self._names.intersection(_vars(module()))), False)
        del self._seen, self._kept, self._chained, self._waiting, self._names, self._followed

    def holds(self) -> bool:
        """Whether all of it is as it was. What was imported since, as a module of a package, is no change."""
        return (
            self._environment == _environment()
            and all(sys.modules.get(name) is module() is not None for name, module in self._modules.items())
            and all(space.is_as_it_was() for space in self._spaces)
            and all(_has_its_code(*function) for function in self._functions)
            and _have_their_code(self._plain_functions)
        )

    def _expected(self, value: Any, depth: int) -> Any:
        """What is compared with what stands in the place of ``value`` later, which is read too."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _CONTAINERS:
            return self._contents(value, _read_dict if kind is dict else list, depth) if depth < _DEEPEST else _ANYTHING
        if kind in _PARTS:
            return self._contents(value, _PARTS[kind], depth)
        before = self._seen.get(id(value), _DEEPEST + 1)
        if before > _DEEPEST or (depth < before and not issubclass(kind, _NAMESPACES)):
            if before > _DEEPEST:
                self._kept.append(value)
            self._seen[id(value)] = min(depth, _DEEPEST)
            self._waiting.append((value, depth))
        return _weak(value)

    def _contents(self, value: Any, read: Callable[[Any], Sequence[Any]], depth: int) -> _Contents:
        return _Contents(type(value), read, (self._expected(each, depth + 1) for each in read(value)))

    def _read(self, value: Any, depth: int) -> None:
        kind = type(value)  # and not isinstance, which asks the object for its class: some are lazy
        if issubclass(kind, ModuleType):
            self._read_module(value)
        elif issubclass(kind, type):
            self._read_class(value)
        elif kind is FunctionType:
            self._read_function(value)
        elif kind is not BuiltinFunctionType:
            self._expected(kind, 0)
            opened = issubclass(kind, _OPENED) or _package(kind.__module__) not in _NOT_FOLLOWED
            if opened and depth < _DEEPEST and not f"{kind.__module__}.".startswith(_AUTO):
                self._read_object(value, depth)

    def _read_module(self, module: ModuleType) -> None:
        name = module.__name__
        if sys.modules.get(name) is not module:
            return
        self._modules[name] = ref(module)
        if self._is_followed(name):
            self._space(module, _vars, True)

    def _read_class(self, kind: type) -> None:
        for base in (*kind.__mro__[1:], type(kind)):
            self._expected(base, 0)
        self._name(kind.__module__)
        if kind.__flags__ & _HEAP_TYPE:  # others can't be changed
            self._space(kind, vars, self._is_followed(kind.__module__))

    def _read_function(self, function: FunctionType) -> None:
        home = str(function.__globals__.get("__name__"))
        self._name(home)
        followed = self._is_followed(home)
        defaults, plain = function.__defaults__, not (function.__kwdefaults__ or function.__closure__ or vars(function))
        if plain and all(type(each) in _PLAIN for each in defaults or ()):
            self._plain_functions += (ref(function), function.__code__, defaults)
        else:
            expected = [self._expected(each, 1) if followed else _ANYTHING for each in _parts_of(function)]
            self._functions.append((ref(function), function.__code__, expected))
        if followed:
            self._read_code(function.__code__, home)

    def _read_code(self, code: CodeType, home: str) -> None:
        for each in nested_code(code):
            self._names.update(each.co_names, (const for const in each.co_consts if type(const) is str))
            for name in _imported_in(each):
                around = home.split(".")
                self._name(name)
                for length in range(1, len(around)):  # a relative import, from some package around
                    self._name(f"{'.'.join(around[:length])}.{name}".rstrip("."))

    def _read_object(self, value: Any, depth: int) -> None:
        for kind in (dict, list, tuple, set, frozenset, deque):
            if issubclass(type(value), kind):
                self._space(value, _dict_of if kind is dict else partial(_numbered, kind), True, depth + 1)
        if type(_vars(value)) is dict:
            self._space(value, _vars, True, depth + 1)

    def _space(self, owner: Any, read: Callable[[Any], Mapping[Any, Any]], followed: bool, depth: int = 0) -> None:
        try:
            weak = ref(owner)
        except TypeError:
            return
        space = read(owner)
        names, values, expected = list(space), list(space.values()), []
        lazy = _LAZY if issubclass(type(owner), ModuleType) else ()
        for name, value in zip(names, values, strict=True):
            kind = type(value)
            if name in _IGNORED or name in lazy:
                expected.append(_ANYTHING)
            elif followed:
                expected.append(value if kind in _PLAIN else self._expected(value, depth))
            else:
                expected.append(_weak(value) if issubclass(kind, _CODE) else _ANYTHING)
        self._spaces.append(_Space(weak, read, names, expected, followed))

    def _find_chained(self) -> None:
        """Modules that code reaches as attributes of modules that are not followed: ``nn.functional``."""
        for name in list(self._modules):
            if name not in self._chained:
                held = list(_vars(sys.modules.get(name)).items())
                self._chained[name] = [
                    (inner, value.__name__) for inner, value in held if type(value) is ModuleType and inner[:1] != "_"
                ]
            for inner, module in self._chained[name]:
                if inner in self._names:
                    self._name(module)

    def _name(self, module: str) -> None:
        if module in sys.modules:
            self._expected(sys.modules[module], 0)

    def _is_followed(self, module: str) -> bool:
        return _package(module) in self._followed and not f"{module}.".startswith(_AUTO)


class _Space:
    """The names in one namespace or container, and what is expected under each.

    ``followed`` is whether anything that is added is a change, and not code alone.
    """

    __slots__ = ("expected", "followed", "names", "owner", "read")

    def __init__(
        self,
        owner: ref[Any],
        read: Callable[[Any], Mapping[Any, Any]],
        names: list[Any],
        expected: list[Any],
        followed: bool,
    ) -> None:
        self.owner, self.read, self.names, self.expected, self.followed = owner, read, names, expected, followed

    def is_as_it_was(self) -> bool:
        if (owner := self.owner()) is None:
            return False
        space = self.read(owner)
        found, values = list(space), list(space.values())
        if len(found) > len(self.names):
            known = len(self.names)
            if any(self._is_new(owner, *each) for each in zip(found[known:], values[known:], strict=True)):
                return False
            del found[known:], values[known:]
        return found == self.names and _all_match(self.expected, values)

    def _is_new(self, owner: Any, name: Any, value: Any) -> bool:
        """Whether ``name`` is an addition that code could have missed before."""
        if name in _IGNORED:
            return False
        if isinstance(owner, ModuleType):  # by an import; transformers' packages get a name when it is first asked for
            lazily = name in _vars(owner).get("_class_to_module", ())
            imported = isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value
            return self.followed and not lazily and not imported
        return self.followed or callable(value) or hasattr(type(value), "__get__")


class _Contents(list[Any]):
    """What is expected in a container, a property or a bound method."""

    __slots__ = ("kind", "read")

    def __init__(self, kind: type, read: Callable[[Any], Sequence[Any]], expected: Iterable[Any]) -> None:
        super().__init__(expected)
        self.kind, self.read = kind, read

    def matches(self, value: Any) -> bool:
        return type(value) is self.kind and _all_match(self, self.read(value))


def _all_match(expected: Sequence[Any], found: Sequence[Any]) -> bool:
    if len(expected) != len(found):
        return False
    for wanted, value in zip(expected, found, strict=True):
        if type(wanted) is ref:
            if wanted() is value and value is not None:  # a reference whose object is gone gives None
                continue
        elif wanted is value or wanted is _ANYTHING or (type(wanted) is _Contents and wanted.matches(value)):
            continue
        return False
    return True


def _has_its_code(function: ref[Any], code: CodeType, expected: list[Any]) -> bool:
    found = function()
    return found is not None and found.__code__ is code and _all_match(expected, _parts_of(found))


def _have_their_code(functions: Iterable[Any]) -> bool:
    """As :func:`_has_its_code`, for functions that close over nothing and whose defaults are plain values."""
    of_each = iter(functions)
    for function, code, defaults in zip(of_each, of_each, of_each, strict=True):
        found = function()
        if found is None or found.__code__ is not code or found.__defaults__ is not defaults:
            return False
        if found.__kwdefaults__ or found.__dict__:
            return False
    return True


def _imported_in(code: CodeType) -> Iterator[str]:
    """The names of the modules that ``code`` imports, as it writes them."""
    numbers = code.co_code  # an instruction is two bytes: what it does, and the index of a name
    if _IMPORT not in numbers[::2]:
        return
    for at in range(0, len(numbers), 2):
        if numbers[at] == _IMPORT:
            above = numbers[at - 1] << 8 if at and numbers[at - 2] == _EXTENDED else 0
            yield code.co_names[above | numbers[at + 1]]


def _parts_of(function: FunctionType) -> list[Any]:
    return [function.__defaults__, function.__kwdefaults__, *closure_contents(function), *vars(function).values()]


def _read_dict(value: dict[Any, Any]) -> list[Any]:
    return [each for pair in _dict_of(value).items() for each in pair]


def _dict_of(value: dict[Any, Any]) -> dict[Any, Any]:
    """``value`` without what bound models have registered: nothing but their configs selects it."""
    return {name: each for name, each in dict.items(value) if not is_in_use(name)}


def _numbered(kind: Any, value: Any) -> dict[int, Any]:
    return dict(enumerate(kind.__iter__(value)))


_PARTS: Mapping[type, Callable[[Any], Sequence[Any]]] = {
    property: lambda value: [value.fget, value.fset, value.fdel],
    staticmethod: lambda value: [value.__func__],
    classmethod: lambda value: [value.__func__],
    MethodType: lambda value: [value.__func__, value.__self__],
    _Cached: lambda value: [value.__wrapped__],  # and not what it keeps, which the function computes
    partial: lambda value: [value.func, value.args, value.keywords],
}
_HEAP_TYPE = 1 << 9
_NAMES_OF_TORCH = frozenset({"torch", "nn", "Tensor"})


def _vars(value: Any) -> Mapping[str, Any]:
    """The attributes of a module or an object, without asking what its class has for that."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _weak(value: Any) -> Any:
    """A reference to ``value``; itself, where there can be none: properties and some objects that C code makes."""
    try:
        return ref(value)
    except TypeError:
        return value


def _some(names: Iterable[str], module: Any) -> dict[str, Any]:
    space = _vars(module)
    return {name: space[name] for name in names if name in space}


def _home(root: Any) -> str:
    return str(root.__name__ if isinstance(root, ModuleType) else root.__module__)


def _package(module: str) -> str:
    return str(module).partition(".")[0]


def _environment() -> dict[str, str]:
    """Without where our own cache is, and which test runs."""
    return {name: value for name, value in os.environ.items() if name != "VEOMNI_CACHE" and name[:7] != "PYTEST_"}
