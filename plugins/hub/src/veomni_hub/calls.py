"""Calls a layer or a function of the Hub with the arguments of an op's contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from veomni_core.errors import ConfigError, did_you_mean
from veomni_hub.hub_kernel import HubKernel

_ATTRIBUTE = "self."


@dataclass(frozen=True)
class Values:
    """What some parameters or attributes get: arguments of the op, by their names, and constants."""

    arguments: Mapping[str, str]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Values:
        """Read a part of an entry's ``call``, in which a constant is ``{value: ...}``."""
        return cls(
            {name: value for name, value in mapping.items() if isinstance(value, str)},
            {name: value["value"] for name, value in mapping.items() if not isinstance(value, str)},
        )

    def filled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The value of each parameter or attribute, where the op is given ``given``."""
        return {**{name: given[argument] for name, argument in self.arguments.items()}, **self.constants}


class _Replaced:
    """A layer's ``self``: layers have no state, and read attributes of the module whose forward they replace.

    A class rather than a ``SimpleNamespace``, which torch.compile doesn't trace.
    """

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class Call:
    """A layer or a function, called as the contract's reference is.

    Attributes:
        function: the function, or the layer's ``forward``.
        arguments: the contract's arguments, in the order in which callers may pass them.
        defaults: the values of those that callers may leave out.
        keywords: what the function's parameters get.
        attributes: what the layer's attributes are; ``None`` for a function.
        left_out: the arguments that it does not get: a call must leave them at their defaults.
        takes_others: whether the contract's callers may pass more, which nobody reads.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]
    defaults: Mapping[str, Any]
    keywords: Values
    attributes: Values | None
    left_out: tuple[str, ...] = ()
    takes_others: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op; raise ConfigError where the call has an argument that was left out."""
        if self.takes_others:
            kwargs = {name: value for name, value in kwargs.items() if name in self.arguments}
        given = {**self.defaults, **dict(zip(self.arguments, args, strict=False)), **kwargs}
        if len(args) > len(self.arguments) or given.keys() != {*self.arguments}:
            raise TypeError(f"takes {', '.join(self.arguments)}, not {len(args)} values and {', '.join(kwargs)}")
        for name in self.left_out:
            if given[name] is not self.defaults[name] and given[name] != self.defaults[name]:
                raise ConfigError(f"the Hub's {self.function.__name__} is not given {name}, and this call has it")
        keywords = self.keywords.filled(given)
        if self.attributes is None:
            return self.function(**keywords)
        return self.function(_Replaced(self.attributes.filled(given)), **keywords)


def call_of(kernel: HubKernel, package: ModuleType, reference: Callable[..., Any]) -> Call:
    """How ``kernel`` is called in the place of the contract's ``reference``.

    Raises:
        ConfigError: the package has no such layer or function, or the entry maps arguments that are not there.
    """
    function = _layer(kernel, package) if kernel.layer else _function(kernel, package)
    parameters = inspect.signature(reference).parameters
    arguments = {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
    left_out = _left_out(kernel, arguments)
    attributes = {name: value for name, value in kernel.call.items() if name.startswith(_ATTRIBUTE)}
    keywords = {name: value for name, value in kernel.call.items() if name not in attributes}
    try:
        inspect.signature(function).bind(*(["self"] if kernel.layer else []), **keywords)
    except TypeError as error:
        what = f"{kernel.layer}.forward" if kernel.layer else kernel.function
        raise ConfigError(f"{kernel}: {what} can't be called with {', '.join(keywords)}: {error}") from error
    return Call(
        function,
        tuple(arguments),
        {name: each.default for name, each in arguments.items() if each.default is not each.empty},
        Values.of(keywords),
        Values.of({name.removeprefix(_ATTRIBUTE): value for name, value in attributes.items()})
        if kernel.layer
        else None,
        left_out,
        takes_others=len(arguments) < len(parameters),
    )


def _left_out(kernel: HubKernel, arguments: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """The arguments of the op that the entry's ``call`` does not use: only if it lists ``features``, and with defaults.

    Raises:
        ConfigError: it leaves out others, or uses what the op doesn't have.
    """
    used = [value for value in kernel.call.values() if isinstance(value, str)]
    for argument in used:
        if argument not in arguments:
            raise ConfigError(
                f"{kernel}: call names the argument {argument!r}, which the op doesn't have. "
                f"{did_you_mean(argument, arguments)}"
            )
    left_out = tuple(argument for argument in arguments if argument not in used)
    without_default = {name for name, each in arguments.items() if each.default is each.empty}
    if needed := [name for name in left_out if "features" not in kernel.promises or name in without_default]:
        raise ConfigError(
            f"{kernel}: call leaves out {', '.join(needed)} of the op; a kernel that ignores an argument computes "
            "something else"
        )
    return left_out


def _layer(kernel: HubKernel, package: ModuleType) -> Callable[..., Any]:
    """The ``forward`` of the kernel's layer, which must promise the backward that the entry promises."""
    layers = getattr(package, "layers", None)
    layer = getattr(layers, kernel.layer, None)
    if not isinstance(layer, type):
        known = [name for name, value in vars(layers).items() if isinstance(value, type)] if layers else []
        raise ConfigError(f"{kernel}: the package has no layer {kernel.layer!r}. {did_you_mean(kernel.layer, known)}")
    _check_backward(kernel, layer)
    return layer.forward  # type: ignore[attr-defined]


def _function(kernel: HubKernel, package: ModuleType) -> Callable[..., Any]:
    function = getattr(package, kernel.function, None)
    if not callable(function):
        known = [name for name in dir(package) if callable(getattr(package, name)) and not name.startswith("_")]
        raise ConfigError(
            f"{kernel}: the package has no function {kernel.function!r}. {did_you_mean(kernel.function, known)}"
        )
    _check_backward(kernel, function)
    return function


def _check_backward(kernel: HubKernel, what: Any) -> None:
    if kernel.spec.backward and not getattr(what, "has_backward", True):
        raise ConfigError(
            f"{kernel}: {kernel.layer or kernel.function} says has_backward = False, so it can't train; write "
            "backward: false, and it can run in evaluation"
        )
