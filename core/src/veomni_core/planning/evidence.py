"""What this machine found out about kernels, as planning reads it: checks that they passed or failed, and times.

veomni-conformance keeps the results of checks, and veomni-tools the times that ``veomni tune`` measured. Where one of
them isn't installed, or the hardware is named and not here, nothing was found.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.references import load_if_installed
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.sites.site import Site

HERE, NEVER = "certified here", "never verified here"
_LEDGER = "veomni_conformance.ledger:Ledger.here"
_TIMES = "veomni_tools.profiles.measured_choice:MeasuredChoices.of"


class Evidence:
    """What checks of kernels found. This class is that of a machine where nothing was found, or that is not here."""

    def failures(self, spec: KernelSpec, plugin: PluginRecord, dtypes: Iterable[str]) -> tuple[str, ...]:
        """How ``spec`` of ``plugin`` failed here in one of ``dtypes``, as phrases; empty if it did not."""
        return ()

    def standing(self, spec: KernelSpec, plugin: PluginRecord, dtypes: Iterable[str]) -> str:
        """:data:`HERE` if ``spec`` passed in all of ``dtypes``, :data:`NEVER`, or where else it passed."""
        return NEVER

    def standing_on_any_device(self, spec: KernelSpec, plugin: PluginRecord) -> str:
        """The same in all dtypes of ``spec``, and of whichever device."""
        return NEVER

    def how_to_check(self, spec: KernelSpec, plugin: PluginRecord) -> str:
        """What a user does to have ``spec`` checked, as a phrase."""
        return f"pip install veomni-conformance, and veomni verify {plugin.distribution} --kernel {spec} checks it"


class Times(Protocol):
    """What was measured of one job on this machine.

    Attributes:
        digest: the short hash of the profile that decided somewhere; empty if none did.
    """

    digest: str

    def kind(self, site: Site, dtypes: tuple[str, ...]) -> Hashable:
        """What is the same of all sites that one measurement is for."""

    def at(self, kind: Hashable, usable: Sequence[KernelSpec]) -> tuple[str | None, str]:
        """What to take at a site of ``kind``, ``eager`` or one of the kernels ``usable`` there; and the figures.

        Or ``None``, and why nothing says; that is empty if this model was never measured.
        """

    def notes(self) -> Iterator[str]:
        """For the plan: which profile decided, and why it did not where it did not."""


def evidence_on(hardware: Hardware) -> Evidence:
    """What is known of kernels on ``hardware``."""
    ledger = load_if_installed(_LEDGER) if hardware.detected else None
    return ledger(hardware) if ledger else Evidence()


def times_of(
    model: Any, batch: tuple[int, int], autocast: str | None, registry: Registry, hardware: Hardware, evidence: Evidence
) -> Times | None:
    """What was measured of ``model`` with steps of so many sequences of this length; ``None`` if nothing can be.

    Raises:
        HostError: the job's profile can't be read.
    """
    times = load_if_installed(_TIMES) if hardware.detected else None
    return times(model, batch, autocast, registry, hardware, evidence) if times else None
