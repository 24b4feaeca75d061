"""Which places of code a proof has read: methods of classes, and what the code names in its files and in torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from veomni_core.changes.bound_subclass import eager_class
from veomni_core.changes.code_places import CodePlace
from veomni_core.sites.site import Site
from veomni_transformers.proving.reachable_code import is_library, nested_code, reached_functions

_METHODS = (property, staticmethod, classmethod)
_METHODS_OF_TENSORS = frozenset(name for name in dir(Tensor) if not name.startswith("_"))
Places = tuple[CodePlace, ...]
Words = frozenset[str]
_MOST_REMEMBERED = 64
_remembered_places: OrderedDict[tuple[Any, ...], Places] = OrderedDict()
_lock = threading.Lock()


class ReadsForward:
    """A locator whose proofs read the forward of the site's module, and what that calls."""

    def code_read(self, model: nn.Module, site: Site) -> Places:
        """As :class:`~veomni_core.sites.site.SiteLocator` describes it."""
        module = module_at(model, site.path)
        return self._places(code_of(module), words=words_of(module))

    def _places(
        self, code: Iterable[Any], tables: Collection[tuple[Any, str, str]] = (), words: Words = frozenset()
    ) -> Places:
        """The places that ``code`` reads; the same tuple for the same code.

        ``tables`` has entries, as ``(table, key, label)``: these are places, and what they read too. So are entries of
        the tables that ``code`` names, under one of ``words``.
        """
        known: dict[tuple[Any, Words], Places] = vars(self).setdefault("_read", {})
        entries = [CodePlace(*each) for each in tables]
        functions = (table.get(key) for table, key, _ in tables)
        roots = tuple(dict.fromkeys((*code, *(each for each in functions if isinstance(each, FunctionType)))))
        if (roots, words) not in known:
            known[roots, words] = (*_places_as_read(roots, words), *entries)
        return known[roots, words]


def _places_as_read(roots: tuple[Any, ...], words: Words) -> Places:
    """As :func:`places_read`, read once for as long as nothing was replaced there: it decides what is read."""
    with _lock:
        places = _remembered_places.pop((roots, words), None)
        if places is None or any(place.replaced() for place in places):
            places = tuple(places_read(roots, words))
        _remembered_places[roots, words] = places
        while len(_remembered_places) > _MOST_REMEMBERED:
            _remembered_places.popitem(last=False)
    return places


def module_at(model: nn.Module, path: str) -> nn.Module:
    """As ``model.get_submodule(path)``, without its checks of each step: a bind looks for hundreds of modules."""
    for name in path.split(".") if path else ():
        model = cast(nn.Module, model._modules[name])
    return model


def code_of(module: nn.Module) -> Iterator[Any]:
    """The class of ``module`` without what a binding put on top, and the functions among its attributes."""
    yield eager_class(type(module))
    yield from (value for value in vars(module).values() if isinstance(value, FunctionType))


def words_of(module: nn.Module) -> Words:
    """The strings among the attributes of ``module``: its code may look something up in a table under one of them."""
    return frozenset(value for value in vars(module).values() if type(value) is str)


def makes_modules(module: nn.Module) -> bool:
    """Whether the code of ``module`` makes another at each call: an activation, as ``ACT2FN[self.activation]``."""
    kind: Any = eager_class(type(module))
    return _makes_modules(kind, kind.forward, words_of(module))


@lru_cache(maxsize=_MOST_REMEMBERED)
def _makes_modules(kind: Any, forward: Any, words: Words) -> bool:
    own = (each for each in reached_functions([forward], kind) if not is_library(each))
    return any(made for function in own for _, _, made in _looked_up(function, words))


def places_read(code: Iterable[Any], words: Words = frozenset()) -> Iterator[CodePlace]:
    """Every place from which ``code`` takes code that runs in a forward.

    ``code`` has functions, classes of modules, and pairs of such a class and a function that runs as its forward.

    torch's and the standard library's code is not followed, but for what ``code`` itself has of it: what stands under
    the names that the followed code uses is a place. So is what stands under one of ``words`` in a table that it names,
    and the code of the module that is made of it.

    Example:
        >>> from transformers.models.llama import modeling_llama
        >>> [place] = [p for p in places_read([modeling_llama.LlamaMLP]) if str(p.key).endswith("'forward')")]
        >>> former, modeling_llama.LlamaMLP.forward = modeling_llama.LlamaMLP.forward, nn.Identity.forward
        >>> place.replaced()
        'LlamaMLP.forward was replaced'
        >>> modeling_llama.LlamaMLP.forward = former
    """
    places: dict[Any, CodePlace] = {}
    for each in code:
        for place in _places_of(each, words):
            places.setdefault(place.key, place)
    return iter(places.values())


def _places_of(code: Any, words: Words = frozenset()) -> Iterator[CodePlace]:
    kind, first = code if isinstance(code, tuple) else (code, None) if isinstance(code, type) else (None, code)
    first = first or kind.forward
    names = {"forward"}
    for function in reached_functions([first], kind):
        if function is first or not is_library(function):
            used = {name for each in nested_code(function.__code__) for name in each.co_names}
            names |= used
            home = str(function.__globals__.get("__name__", "")).rpartition(".")[2]
            yield from _in_namespace(function.__globals__, home, used)
            yield from (CodePlace(Tensor, name, f"Tensor.{name}") for name in used & _METHODS_OF_TENSORS)
            for name, key, made in _looked_up(function, words):
                yield CodePlace(function.__globals__, name, f"{home}.{name}")
                yield CodePlace(function.__globals__[name], key, f"{home}.{name}[{key!r}]")
                yield from (place for each in made for place in _places_of(each))
    if kind is None:
        return
    yield CodePlace(kind, "__call__", f"{kind.__qualname__}.__call__")
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name in names & vars(base).keys():
            if callable(vars(base)[name]) or isinstance(vars(base)[name], _METHODS):
                yield CodePlace(kind, name, f"{kind.__qualname__}.{name}")


def _looked_up(function: FunctionType, words: Words) -> Iterator[tuple[str, str, list[Any]]]:
    """Each table that ``function`` names, with each of ``words`` in it, and the class of modules that stands there."""
    names = {name for code in nested_code(function.__code__) for name in code.co_names} if words else set()
    for name in sorted(names & function.__globals__.keys()):
        table = function.__globals__[name]
        for key in sorted(words & table.keys()) if isinstance(table, dict) else ():
            entry = table.get(key)  # of ACT2FN, whose [] makes a module: a class, or a class and its arguments
            first = entry[0] if isinstance(entry, tuple) and entry else entry
            yield name, key, [first] if isinstance(first, type) and issubclass(first, nn.Module) else []


def _in_namespace(space: dict[str, Any], home: str, names: Collection[str], depth: int = 0) -> Iterator[CodePlace]:
    """The functions and classes of ``space`` under ``names``, and in the modules that it has there, as ``nn``."""
    for name in names & space.keys():
        value = space[name]
        if isinstance(value, ModuleType):
            if depth < 3:  # torch.nn.functional
                yield from _in_namespace(vars(value), name, names, depth + 1)
        elif callable(value):
            yield CodePlace(space, name, f"{home}.{name}")
