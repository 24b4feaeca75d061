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

from veomni_core.changes.forward_functions import captured_cell
from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.sites.functions import current_forward, global_functions, with_globals, within_layer

Function = Callable[..., Any]
# A variable of transformers' decorator: what it calls, which is the function it decorates or a package's.
_CHOSEN = "implementation"
PACKAGES = frozenset({"causal_conv1d", "fla", "mamba_ssm"})


def chosen(function: Any, home: str) -> str:
    """What a model of the modeling file ``home`` would run: ``eager`` for code of its own package, else its name."""
    cell = captured_cell(function, _CHOSEN)
    running = function if cell is None else cell.cell_contents
    package = str(getattr(running, "__module__", type(running).__module__))
    if package.split(".")[0] in (home.split(".")[0], "transformers"):
        return EAGER
    return f"{package}.{getattr(running, '__name__', type(running).__name__)}"


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
    """The modeling file's own function, if ``value`` is a choice between it and a package's, and the package's runs."""
    function = within_layer(value)
    if not isinstance(function, FunctionType) or captured_cell(function, _CHOSEN) is None:
        return None
    return inspect.unwrap(function) if chosen(function, home) != EAGER else None


def _package(module: str | None) -> str:
    package = str(module).split(".")[0]
    return package if package in PACKAGES else ""


def _refusing(name: str, package: str) -> Function:
    def forward(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{name} is code of the package {package}, which runs on its own device alone")

    return forward
