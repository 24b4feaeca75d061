"""Raises each error by its provocation, and says what it was raised by and what it said."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reference_pages import provocations
from veomni_core.errors import VeOmniError

_SHOWN = 4  # lines of a message; a check can name dozens of samples


@dataclass(frozen=True)
class Provoked:
    """An error that was raised: the lines that raised it, what the docstring says of them, and the message."""

    code: str
    remark: str
    message: str


def provoke(error: type[VeOmniError]) -> Provoked:
    """Raise an error of exactly this class.

    Raises:
        LookupError: there is no provocation of its name, or it raised nothing.
        TypeError: it raised another error.
    """
    provocation = vars(provocations).get(error.__name__)
    if provocation is None:
        raise LookupError(f"{error.__name__}: write a function of this name in {provocations.__file__}")
    caught = _raised(provocation)
    if type(caught) is not error:
        raise TypeError(f"the provocation of {error.__name__} raised {type(caught).__name__}: {caught}") from caught
    return Provoked(_body(provocation), inspect.getdoc(provocation) or "", _shortened(str(caught)))


def _raised(provocation: Callable[[], None]) -> Exception:
    with _empty_folder(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            provocation()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold bound models
            return error
    raise LookupError(f"the provocation of {provocation.__name__} raised nothing")


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    """An empty working directory, which modules and plugins are looked for in. What was imported there is forgotten."""
    before, modules, environ = os.getcwd(), {*sys.modules}, dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.path.remove(folder)
            os.environ.clear()
            os.environ.update(environ)
            for name in {*sys.modules} - modules:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
                    del sys.modules[name]


def _body(provocation: Callable[[], None]) -> str:
    """The lines of a function, without its first one and its docstring."""
    source = textwrap.dedent(inspect.getsource(provocation))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    documented = ast.get_docstring(function) is not None
    first = function.body[documented].lineno
    return textwrap.dedent("\n".join(source.splitlines()[first - 1 :]))


def _shortened(message: str) -> str:
    """A message without traces of calls, which name paths, and with its first lines alone."""
    told, traced, _ = message.partition("\nTraceback (most recent call last)")
    lines = told.splitlines()
    return "\n".join([*lines[:_SHOWN], *["..."] * (bool(traced) or len(lines) > _SHOWN)])
