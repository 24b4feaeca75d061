"""The packages that TRL's methods need."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from veomni_core.errors import HostError

_OLDEST = Version("1.16")  # the first whose trainers compute log-probabilities by a fused head of their own
_INSTALL = "pip install 'veomni-trainer[trl]'"


def require_trl(who: str) -> None:
    """Raise HostError unless TRL is here, new enough, and the bridge to it. ``who`` needs them, for the message."""
    found: dict[str, str] = {}
    for package in ("trl", "veomni-bridges"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise HostError(f"{who} needs {package}, which is not installed: {_INSTALL}") from None
    if Version(found["trl"]) < _OLDEST:
        raise HostError(f"{who} needs trl {_OLDEST} or newer, and {found['trl']} is here: {_INSTALL}")


def orpo() -> Any:
    """TRL's module with ORPO, which TRL 1.16 has among its experimental ones, with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental import orpo as module
    return module
