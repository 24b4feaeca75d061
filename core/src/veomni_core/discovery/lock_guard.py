"""Where a lock file is named: what holds this process to it is veomni-tools', and imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veomni_core.descriptions.references import load_from
from veomni_core.errors import LockFileError

FROZEN = "VEOMNI_FROZEN"


def lock_guard(environ: Mapping[str, str]) -> Any:
    """What refuses to differ from the lock file that ``VEOMNI_FROZEN`` names; ``None`` where it is not set.

    Raises:
        LockFileError: there is no such file, it is damaged, or veomni-tools is not installed.
    """
    name = environ.get(FROZEN, "").strip()
    return lock_reader("locked:Guard", FROZEN)(name) if name else None


def lock_reader(reference: str, named_by: str) -> Any:
    """What veomni-tools has under ``reference``, in its folder of lock files.

    Raises:
        LockFileError: veomni-tools is not installed, and ``named_by`` requires it.
    """
    try:
        return load_from(f"veomni_tools.locks.{reference}")
    except ImportError as error:
        raise LockFileError(f"{named_by} names a lock file, and {error}") from error
