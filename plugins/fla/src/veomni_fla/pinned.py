"""Copies of a library's function that call one implementation, whatever the environment and other packages say.

flash-linear-attention decorates most of its functions with a dispatcher. At every call it reads environment variables
(``FLA_TILELANG``, ``FLA_FLASH_QLA``, ``FLA_INTRACARD_CP``, ...), looks for packages, and may run another implementation
than the one that was verified. The dispatchers are globals of fla's modules, which everybody shares. So nothing is
replaced there: a function is copied together with those that it calls, and in the copies each dispatcher is the
function that it decorates.

A library's autograd functions become subclasses that raise for second derivatives, which they would compute wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

from torch.autograd import Function

from veomni_core.kernels import first_derivatives_only

_Value = TypeVar("_Value")
_Chosen = Mapping[str, Callable[..., Any]]
_Compiled = Callable[[Any], Any]
_DISPATCHER = "BackendRegistry.dispatch."  # how the qualified name of fla's dispatchers begins


def pinned(function: _Value, chosen: _Chosen | None = None, compiled: _Compiled | None = None) -> _Value:
    """A copy of ``function`` that calls the implementations that its library has by default, or those ``chosen``.

    Args:
        function: a function, or an autograd function, of a package. What it calls in this package is copied too.
        chosen: what is called in the place of a dispatched function, by the function's name.
        compiled: makes of each kernel in TileLang the one that is called in its place.

    Raises:
        ImportError: no function of a name in ``chosen`` is dispatched, so the library is another one than expected.
    """
    copies = _Copies(function.__module__.partition(".")[0], chosen or {}, compiled)
    copy = copies.of(function)
    if never := sorted({*copies.chosen} - copies.met):
        raise ImportError(
            f"{copies.package} dispatches no {' and no '.join(never)}: it is another version than expected"
        )
    return copy


class _Copies:
    """The copies of one package's functions that belong together."""

    def __init__(self, package: str, chosen: _Chosen, compiled: _Compiled | None) -> None:
        self.package, self.chosen, self.compiled, self.met = package, chosen, compiled, set[str]()
        self._made: dict[Any, Any] = {}
        self._namespaces: dict[str, dict[str, Any]] = {}

    def of(self, value: Any) -> Any:
        """The copy of ``value``; itself, if it is nothing of the package that can be copied."""
        if self.compiled and type(value).__name__ == "JITImpl":
            return self.compiled(value)
        if not isinstance(value, (FunctionType, type)) or not self._is_of_package(value.__module__):
            return value
        if value not in self._made:
            if isinstance(value, FunctionType):
                self._copy_function(value)
            else:
                self._made[value] = self._once(value) if issubclass(value, Function) else value
        return self._made[value]

    def _is_of_package(self, module: str | None) -> bool:
        return (module or "").partition(".")[0] == self.package

    def _copy_function(self, function: FunctionType) -> None:
        if (plain := _dispatched(function)) is not None:
            self.met.add(plain.__name__)
            self._made[function] = self.chosen.get(plain.__name__) or self.of(plain)
            return
        # A decorator's function has the module of what it decorates, and the globals of its own.
        own_globals = self._is_of_package(function.__globals__["__name__"])
        namespace = self._namespace(function.__globals__) if own_globals else function.__globals__
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__, copy.__module__, copy.__qualname__ = (
            function.__kwdefaults__,
            function.__module__,
            function.__qualname__,
        )
        self._made[function] = copy  # before what it calls, which may call it
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.of(original.cell_contents)
        if own_globals:
            for name in _names(function.__code__) & function.__globals__.keys():
                namespace[name] = self.of(function.__globals__[name])

    def _namespace(self, original: dict[str, Any]) -> dict[str, Any]:
        return self._namespaces.setdefault(original["__name__"], dict(original))

    def _once(self, function: Any) -> type:
        """A subclass of an autograd function that calls the copies."""
        backward = first_derivatives_only(self.of(function.backward))
        parts = {"forward": staticmethod(self.of(function.forward)), "backward": staticmethod(backward)}
        return type(function.__name__, (function,), {**parts, "__module__": function.__module__})


def _dispatched(function: FunctionType) -> FunctionType | None:
    """The function that fla's dispatcher decorates; ``None`` if ``function`` is no dispatcher."""
    # fla keeps torch.compile out of its dispatchers by another decorator. The adapters keep it out of themselves.
    inner = getattr(function, "_torchdynamo_orig_callable", function)
    is_dispatcher = isinstance(inner, FunctionType) and inner.__code__.co_qualname.startswith(_DISPATCHER)
    return inner.__wrapped__ if is_dispatcher else None  # type: ignore[union-attr]


def _names(code: CodeType) -> set[str]:
    """The names that ``code``, or code inside of it, looks up."""
    inside = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names, inside))
