"""Where a lock file is named: what holds this process to it is veomni-tools', and imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veomni_core.descriptions.references import load_for
from veomni_core.errors import LockFileError

FROZEN = "VEOMNI_FROZEN"


def lock_reader(environ: Mapping[str, str], reference: str) -> Any:
    """What veomni-tools has under ``reference``, in its folder of lock files; ``None`` where no lock file is named.

    Raises:
        LockFileError: ``VEOMNI_FROZEN`` names one, and veomni-tools is not installed.
    """
    if not environ.get(FROZEN, "").strip():
        return None
    return load_for(f"{FROZEN} names a lock file, and", LockFileError, f"veomni_tools.locks.{reference}")
