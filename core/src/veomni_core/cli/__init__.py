"""The ``veomni`` command. Exit codes: 0 success, 1 something fails or can't be had here, 2 wrong usage."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from veomni_core.errors import ConfigError, KernelUnavailableError, NoSiteError, VeOmniError

GOOD, FALLS_SHORT, BAD_USAGE = 0, 1, 2


def main() -> None:
    """Entry point of the console script."""
    from veomni_core.cli.app import build_app
    from veomni_core.discovery.discover import TRIAL_TIMEOUT

    if find_spec("veomni_tools"):
        os.environ.setdefault(TRIAL_TIMEOUT, "60")
    if "--json" in sys.argv and sys.stdout and sys.stderr:  # what plugins, or C beneath them, print is no part
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
        os.dup2(2, 1)
    try:
        build_app()(prog_name="veomni")
    except VeOmniError as error:
        print(show_error(error), file=sys.stderr)
        sys.exit(exit_code(error))


def show_error(error: VeOmniError) -> str:
    """The error as commands print it. Its last word is its class, under which docs/reference/errors.md explains it."""
    return f"error: {error} [{type(error).__name__}]"


def exit_code(error: VeOmniError) -> int:
    """2 if the command line or the job file must be corrected, 1 if this machine can't provide what they request."""
    falls_short = isinstance(error, (KernelUnavailableError, NoSiteError)) or not isinstance(error, ConfigError)
    return FALLS_SHORT if falls_short else BAD_USAGE
