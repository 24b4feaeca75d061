"""Names of Python objects as text: descriptions hold them, and what they name is imported when it is used."""

from __future__ import annotations

import importlib
import sys
from contextlib import redirect_stdout, suppress
from opcode import opname
from typing import Any


def load_attribute(reference: str) -> Any:
    """Import ``"module:attribute"`` (the attribute may be dotted) and return it."""
    module_name, _, attribute = reference.partition(":")
    with redirect_stdout(sys.stderr):  # a module may print while it is imported, and standard output is the command's
        value: Any = importlib.import_module(module_name)
    for name in attribute.split("."):
        value = getattr(value, name)
    return value


def call_attribute(reference: str, *arguments: Any) -> Any:
    """Call the function that ``reference`` names. What it prints goes to standard error, as what its module does."""
    with redirect_stdout(sys.stderr):
        return load_attribute(reference)(*arguments)


def reference_to(value: Any) -> str:
    """The ``"module:attribute"`` of a function or class at the top of a module; empty for anything else."""
    reference = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    with suppress(ImportError, AttributeError, ValueError):
        return reference if load_attribute(reference) is value else ""
    return ""


def load_if_installed(reference: str) -> Any | None:
    """As :func:`load_attribute`, of another distribution of the family; ``None`` if that is not installed."""
    try:
        return load_attribute(reference)
    except ModuleNotFoundError as error:
        if error.name != reference.partition(".")[0]:
            raise
        return None


def load_from(reference: str) -> Any:
    """As :func:`load_attribute`, of another distribution of the family.

    Raises:
        ImportError: the distribution is not installed; the message says how to install it.
    """
    if (found := load_if_installed(reference)) is None:
        package = reference.partition(".")[0]
        distribution = package.replace("_", "-")
        raise ImportError(f"{distribution} is not installed: pip install {distribution}", name=package)
    return found


def load_for(purpose: str, refusal: type[Exception], reference: str) -> Any:
    """As :func:`load_from`; ``refusal`` is raised in place of its error, and says first what ``reference`` is for."""
    try:
        return load_from(reference)
    except ImportError as error:
        raise refusal(f"{purpose} {error}") from error


def raise_interrupt(error: BaseException) -> None:
    """Raise ``error``, with which a plugin's code ended, again if the user pressed Ctrl-C: no ``raise`` gave it."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    raised = trace is not None and opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]].startswith("RAISE")
    if isinstance(error, KeyboardInterrupt) and not raised:
        raise error
