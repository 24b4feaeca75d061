"""docs/reference/errors.md: every error that this project raises on purpose, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from reference_pages.markdown import prose
from reference_pages.provoked import provoke
from veomni_core import errors
from veomni_core.cli import exit_code
from veomni_core.errors import VeOmniError

_HEAD = """# Errors

Every error that is raised on purpose is a `VeOmniError`, in `veomni_core.errors`. Its message says what was asked
for, what is here, and what to do; all reasons come in one message. The class says who must act, and the exit code of
a command says it to a script: 2 where the command line or the job must be corrected, 1 where this machine, a plugin
or a run falls short. A command prints the class behind the message: `error: ... [ConfigError]`.

Each section has lines that raise the error, and the message that they gave. In them `registry()` describes the plugins
of this repository, `small_llama()` is a Llama of one layer, and `write_plugin` installs a plugin `acme`. They run on a
CPU, in one process.
"""


def page() -> str:
    """The page's text."""
    return "\n".join([_HEAD, *_sections(VeOmniError, 2)])


def _sections(base: type[VeOmniError], level: int) -> Iterator[str]:
    for error in base.__subclasses__():
        if error.__module__ != errors.__name__:
            continue
        yield f"{'#' * level} `{error.__name__}`\n"
        builtin = next(each.__name__ for each in error.__mro__ if each.__module__ == "builtins")
        yield f"Exit code {exit_code(error())}{f'; a `{builtin}` too' * (builtin != 'Exception')}.\n"
        yield f"{prose(error)}\n"
        yield from _example(error)
        yield from _sections(error, min(level + 1, 4))


def _example(error: type[VeOmniError]) -> Iterator[str]:
    found = provoke(error)
    if found.remark:
        yield f"{found.remark}\n"
    yield f"```python\n{found.code}\n```\n"
    yield f"```text\n{found.message}\n```\n"
