"""The libraries that bridges lead to, each an extra of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from veomni_core.errors import HostError


def require(distribution: str, at_least: str, *, extra: str) -> None:
    """Raise if ``distribution`` is not installed, or is older than what the bridge was written for.

    Raises:
        HostError: the message names the extra that brings it.
    """
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        installed = None
    if installed is None or Version(installed) < Version(at_least):
        here = f"{installed} is here" if installed else "it is not installed"
        raise HostError(
            f"this bridge needs {distribution} {at_least} or newer, and {here}: pip install 'veomni-bridges[{extra}]'"
        )
