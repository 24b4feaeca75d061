"""The ``veomni`` command: 0 is good, 1 falls short, 2 is bad usage."""

from __future__ import annotations

import sys

from veomni_core.errors import ConfigError, KernelUnavailableError, NoSiteError, VeOmniError

GOOD, FALLS_SHORT, BAD_USAGE = 0, 1, 2


def main() -> None:
    """Entry point of the console script."""
    from veomni_core.cli.app import build_app

    try:
        build_app()()
    except VeOmniError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))


def exit_code(error: VeOmniError) -> int:
    """2 where the command line or the job file must be corrected, 1 where what it asks for can't be had here."""
    falls_short = isinstance(error, (KernelUnavailableError, NoSiteError)) or not isinstance(error, ConfigError)
    return FALLS_SHORT if falls_short else BAD_USAGE
