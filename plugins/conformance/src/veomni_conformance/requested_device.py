"""The device on which kernels are checked: the one that somebody names, or what this machine has."""

from __future__ import annotations

from veomni_core.descriptions.hardware import Hardware
from veomni_core.errors import HostError


def device_here(found: Hardware, asked: str | None, asked_by: str) -> tuple[Hardware, str]:
    """The hardware against which requirements are checked, and torch's name of the device to run on.

    Args:
        found: the hardware of this machine.
        asked: a device's name (``cuda:1``); ``None`` for ``found``.
        asked_by: the option or attribute that names it, for messages.

    Raises:
        HostError: this machine has no device ``asked``.
    """
    if asked is None:
        return found, found.torch_device_type
    kind, _, index = asked.partition(":")
    if kind == "cpu":
        return Hardware.cpu(), "cpu"
    here = {"cuda", "rocm"} if found.device_type == "rocm" else {found.device_type}
    if kind not in here:
        raise HostError(
            f"{asked_by} {asked}: this machine has no such device ({found.describe()}); run this on a machine that has "
            f"one, or leave out {asked_by}"
        )
    if index and not (index.isdecimal() and int(index) < found.count):
        raise HostError(f"{asked_by} {asked}: this machine's {kind} devices are numbered 0 to {found.count - 1}")
    # torch calls AMD's GPUs cuda too.
    return found, f"{'cuda' if kind == 'rocm' else kind}{':' if index else ''}{index}"
