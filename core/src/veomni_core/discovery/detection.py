"""Asks a plugin's device type whether this machine has such a device."""

from __future__ import annotations

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.references import load_attribute
from veomni_core.descriptions.spec import DeviceSpec


def detect(device: DeviceSpec) -> tuple[Hardware | None, str]:
    """Call ``device.detect``. Returns the hardware, or ``None``; and what went wrong, which is empty if nothing did."""
    try:
        found = load_attribute(device.detect)()
    except (Exception, SystemExit) as error:
        return None, f"{device.detect} failed: {error!r}"
    if found is None or isinstance(found, Hardware):
        return found, ""
    return None, f"{device.detect} must return a Hardware or None, not {found!r} ({type(found).__name__})"
