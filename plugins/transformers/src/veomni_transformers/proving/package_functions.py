"""The functions and modules that transformers takes from a package for GPUs where one is installed.

A decorator of transformers chooses when a modeling file is imported; in 5.2 a layer's ``__init__`` does, and sets the
function as an attribute. Either keeps the file's own function, which runs anywhere. A package's is Triton or CUDA.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NoReturn

from torch import nn

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_transformers.captured_cells import captured_cell
from veomni_transformers.proving.functions import current_forward, global_functions, with_globals, within_layer

Function = Callable[..., Any]
# Where transformers' decorator is, and its variables: what it calls, and the function that it decorates.
_CHOOSER, _CHOSEN, _WRITTEN = "transformers.integrations.hub_kernels", "implementation", "torch_function"
PACKAGES = frozenset({"causal_conv1d", "fla", "mamba_ssm"})


def written(function: Any) -> Any:
    """The modeling file's own function, if transformers' decorator made ``function`` of it; else ``function`` itself.

    What any other decorator makes of a function may compute something else, whatever ``functools.wraps`` says of it.
    """
    return _variable_of_chooser(function, _WRITTEN, function)


def is_of_a_package(function: Any) -> bool:
    """Whether ``function`` is what a package for GPUs has under this name, and no wrapper of somebody's around it."""
    module, name = (str(getattr(function, each, "")) for each in ("__module__", "__name__"))
    return bool(_package(module)) and getattr(sys.modules.get(module), name, None) is function


def chosen(function: Any, home: str) -> str:
    """What a model of the modeling file ``home`` would run: ``eager`` for code of its own package, else its name."""
    return _named(_variable_of_chooser(function, _CHOSEN, function), home)


def leave_out_packages(copy: nn.Module) -> None:
    """Let ``copy``, a module's copy for probes, call its file's own functions where the module calls a package's.

    A package's kernels read the addresses of their tensors. Tensors on meta have none: on a GPU a kernel then writes to
    address 0, and the process can't use the GPU any more. Where nothing can be called in its place, a call raises.
    """
    home = type(copy).__module__
    if _package(home):
        vars(copy)["forward"] = _refusing(type(copy).__qualname__, _package(home))
        return
    for name, value in vars(copy).items():
        if isinstance(value, FunctionType) and _package(value.__module__):
            vars(copy)[name] = getattr(sys.modules.get(home), f"torch_{name}", None)
    forward = current_forward(copy)
    named = {name: _own(value, home) for name, value in global_functions(forward)}
    if own := {name: function for name, function in named.items() if function is not None}:
        vars(copy)["forward"] = MethodType(with_globals(forward, own), copy)


def _own(value: Any, home: str) -> Function | None:
    """The modeling file's own function, if ``value`` is a choice between it and a package's, and the package's runs.

    Also if somebody wrapped the choice: what the wrapper does to values is no matter on meta.
    """
    function = within_layer(value)
    cell = captured_cell(function, _CHOSEN) if isinstance(function, FunctionType) else None
    if cell is None or _named(cell.cell_contents, home) == EAGER:
        return None
    return inspect.unwrap(function)


def _named(running: Any, home: str) -> str:
    package = str(getattr(running, "__module__", type(running).__module__))
    if package.split(".")[0] in (home.split(".")[0], "transformers"):
        return EAGER
    return f"{package}.{getattr(running, '__name__', type(running).__name__)}"


def _variable_of_chooser(function: Any, name: str, otherwise: Any) -> Any:
    if not isinstance(function, FunctionType) or function.__globals__.get("__name__") != _CHOOSER:
        return otherwise
    cell = captured_cell(function, name)
    return otherwise if cell is None else cell.cell_contents


def _package(module: str | None) -> str:
    package = str(module).split(".")[0]
    return package if package in PACKAGES else ""


def _refusing(name: str, package: str) -> Function:
    def forward(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{name} is code of the package {package}, which runs on its own device alone")

    return forward
