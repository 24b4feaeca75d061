"""The device on which kernels are checked: the named one, or this machine's."""

from __future__ import annotations

from veomni_core.descriptions.hardware import Hardware
from veomni_core.errors import HostError


def device_here(found: Hardware, device: str | None, named_by: str) -> tuple[Hardware, str]:
    """The hardware against which requirements are checked, and torch's name of the device to run on.

    Args:
        found: the hardware of this machine.
        device: a device's name (``cuda:1``); ``None`` for ``found``.
        named_by: the option or attribute that names it, for messages.

    Raises:
        HostError: this machine has no device ``device``.
    """
    if device is None:
        return found, found.torch_device_type
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return Hardware.cpu(), "cpu"
    here = {"cuda", "rocm"} if found.device_type == "rocm" else {found.device_type}
    if kind not in here:
        raise HostError(
            f"{named_by} {device}: this machine has no such device ({found.describe()}); run this on a machine that "
            f"has one, or leave out {named_by}"
        )
    if index and not (index.isdecimal() and int(index) < found.count):
        raise HostError(f"{named_by} {device}: this machine's {kind} devices are numbered 0 to {found.count - 1}")
    # torch calls AMD's GPUs cuda too.
    return found, f"{'cuda' if kind == 'rocm' else kind}{':' if index else ''}{index}"
