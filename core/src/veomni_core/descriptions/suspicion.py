"""Machines on which a kernel was wrong, or was never run, and must pass its contract first. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from veomni_core.descriptions.field_types import check_fields, from_data
from veomni_core.descriptions.hardware import Hardware, HardwareRequirement


@dataclass(frozen=True)
class Suspicion:
    """That a kernel was wrong on some machines, or never run; ``veomni verify`` must have passed it to be chosen there.

    A range of versions is where somebody saw the fault, and not where it ends. So it decides who is asked, and the
    contract, run once on the device, decides what is answered.

    Args:
        where: the machines in question: device, compute capabilities, and versions of packages such as triton.
        why: what was wrong there, or that nobody ran it, as a phrase for messages.
        seen: whether somebody saw the fault. ``veomni verify`` then expects the kernel to fail there; a failure of a
            kernel that nobody ran is news.

    Example:
        >>> hopper = HardwareRequirement("cuda", min_compute_capability=90, max_compute_capability=90)
        >>> suspicion = Suspicion(hopper, "gradients were wrong on Hopper")
        >>> suspicion.covers(Hardware.named("h200")), suspicion.covers(Hardware.named("a100"))
        (True, False)
    """

    where: HardwareRequirement
    why: str
    seen: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "Suspicion", names=("why",))

    def covers(self, hardware: Hardware) -> bool:
        """Whether ``hardware`` is one of the machines. Of hardware that isn't here, versions of packages are unknown.

        Args:
            hardware: the hardware that a plan is for.
        """
        return not self.where.unmet(hardware)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Suspicion:
        """The suspicion that ``dataclasses.asdict`` turned into ``data``; raises SpecError if it is none."""
        return from_data(cls, data)
