"""Calls a layer or a function of the Hub with the arguments of an op's contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from veomni_core.errors import ConfigError, did_you_mean
from veomni_hub.hub_kernel import HubKernel

_ATTRIBUTE = "self."


@dataclass(frozen=True)
class Call:
    """Which arguments a layer or a function gets.

    Attributes:
        function: the function, or the layer's ``forward``.
        parameters: the contract's arguments, in the order in which callers may pass them.
        defaults: the values of those that callers may leave out.
        keywords: the contract's argument for each parameter of ``function``.
        attributes: the contract's argument for each attribute that the layer reads; ``None`` for a function.
        constants, constant_attributes: the parameters and attributes that always have the same value.
    """

    function: Callable[..., Any]
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    keywords: Mapping[str, str]
    attributes: Mapping[str, str] | None
    constants: Mapping[str, Any]
    constant_attributes: Mapping[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the op: called as the contract's reference is."""
        given = {**self.defaults, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        if len(args) > len(self.parameters) or not given.keys() <= {*self.parameters}:
            raise TypeError(f"takes {', '.join(self.parameters)}, not {len(args)} values and {', '.join(kwargs)}")
        keywords = {name: given[argument] for name, argument in self.keywords.items()}
        if self.attributes is None:
            return self.function(**keywords, **self.constants)
        # A layer has no state of its own: it reads what the module has whose forward it replaces.
        attributes = {name: given[argument] for name, argument in self.attributes.items()}
        module = SimpleNamespace(**attributes, **self.constant_attributes)
        return self.function(module, **keywords, **self.constants)


def call_of(kernel: HubKernel, package: ModuleType, reference: Callable[..., Any]) -> Call:
    """How ``kernel`` is called in the place of the contract's ``reference``.

    Raises:
        ConfigError: the package has no such layer or function, or the entry maps arguments that are not there.
    """
    function = _layer(kernel, package) if kernel.layer else _function(kernel, package)
    arguments = inspect.signature(reference).parameters
    for name, argument in kernel.call.items():
        if isinstance(argument, str) and argument not in arguments:
            raise ConfigError(
                f"{kernel}: call gives {name} the argument {argument!r}, which the op doesn't have. "
                f"{did_you_mean(argument, arguments)}"
            )
    if unused := [name for name in arguments if name not in kernel.call.values()]:
        raise ConfigError(
            f"{kernel}: call leaves out {', '.join(unused)} of the op; a kernel that ignores an argument computes "
            "something else"
        )
    inputs = {name: value for name, value in kernel.call.items() if isinstance(value, str)}
    constants = {name: value["value"] for name, value in kernel.call.items() if not isinstance(value, str)}
    call = Call(
        function,
        tuple(arguments),
        {name: each.default for name, each in arguments.items() if each.default is not each.empty},
        _parameters(inputs),
        _attributes(inputs) if kernel.layer else None,
        _parameters(constants),
        _attributes(constants),
    )
    keywords = {**call.keywords, **call.constants}
    try:
        inspect.signature(function).bind(*(["self"] if kernel.layer else []), **keywords)
    except TypeError as error:
        what = f"{kernel.layer}.forward" if kernel.layer else kernel.function
        raise ConfigError(f"{kernel}: {what} can't be called with {', '.join(keywords)}: {error}") from error
    return call


def _parameters(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if not name.startswith(_ATTRIBUTE)}


def _attributes(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_ATTRIBUTE): value for name, value in mapping.items() if name.startswith(_ATTRIBUTE)}


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
