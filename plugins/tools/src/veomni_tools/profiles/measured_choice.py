"""Chooses a kernel by what ``veomni tune`` measured, where that still holds; and says why where it doesn't."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from veomni_conformance.ledger import Ledger
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import EAGER, KernelSpec
from veomni_core.discovery.registry import Registry
from veomni_core.planning.evidence import HERE, Evidence
from veomni_core.sites.site import Site
from veomni_tools.profiles.measured_job import MeasuredJob, MeasuredOn
from veomni_tools.profiles.profile import Contender, MeasuredSite, Profile, best, shown_bytes, shown_ms
from veomni_tools.profiles.profile_store import other_profiles, profile_file, read_profile
from veomni_tools.profiles.site_kind import SiteKind


class MeasuredChoices:
    """What is measured of one job on this machine.

    Args:
        job: the model, and the shape of its steps.
        registry: the plugins that kernels are of.
        ledger: what is certified here: nothing else is chosen.

    Raises:
        HostError: the job's profile can't be read.
    """

    def __init__(self, job: MeasuredJob, registry: Registry, ledger: Ledger) -> None:
        self._registry, self._ledger = registry, ledger
        hardware = ledger.machine.hardware.describe()
        self._file = profile_file(job, hardware)
        self._profile = read_profile(self._file)
        self._others = "" if self._profile else _shapes_of_others(job, hardware)
        self._used = False
        self._stale: dict[str, None] = {}

    @classmethod
    def of(
        cls,
        model: Any,
        batch: tuple[int, int],
        autocast: str | None,
        registry: Registry,
        hardware: Hardware,
        evidence: Evidence,
    ) -> MeasuredChoices | None:
        """What is measured of such steps of ``model``; ``None`` for a model whose shapes nothing states."""
        job = MeasuredJob.of(model, batch, autocast)
        ledger = evidence if isinstance(evidence, Ledger) else Ledger.here(hardware)
        return cls(job, registry, ledger) if job else None

    def kind(self, site: Site, dtypes: tuple[str, ...]) -> SiteKind:
        """The kind of a site, by which it is measured."""
        return SiteKind.of(site, dtypes)

    def at(self, kind: SiteKind, usable: Sequence[KernelSpec]) -> tuple[str | None, str]:
        """What to take at a site of ``kind``, of the model's own code and of the kernels that are ``usable`` there."""
        profile = self._profile
        if profile is None:
            return None, self._others
        preferred = [spec for spec in usable if spec.preference > 0]
        site = profile.at(kind)
        if site is None or not site.measured:
            return None, f"not measured: profile {profile.digest} has no times of such a site"
        changed = [*self._changes_here(profile), *self._changes_of(site, preferred)]
        if changed:
            self._stale.update(dict.fromkeys(changed))
            return None, f"not by profile {profile.digest}, which is stale: {'; '.join(changed)}"
        names = {EAGER, *(spec.name for spec in preferred)}
        able = [each for each in site.measured if each.kernel in names]
        if not able:
            return None, f"not measured: profile {profile.digest} has no times of what is usable here"
        self._used = True
        figures = _figures(able, kind.own)
        return best(able).kernel, f"chosen by measurement: {figures} (profile {profile.digest})"

    @property
    def digest(self) -> str:
        """The short hash of the profile that decided somewhere; empty if none did."""
        return self._profile.digest if self._profile and self._used else ""

    def notes(self) -> Iterator[str]:
        """For the plan: which profile decided, and why it did not where it did not."""
        if self._profile is None:
            return
        where = f"profile {self._profile.digest} of {self._profile.date} ({self._file})"
        if self._used:
            yield f"by measurement: {where}"
        if self._stale:
            yield f"stale, not used: {where}: {'; '.join(self._stale)}; veomni tune measures again"

    def _changes_here(self, profile: Profile) -> Iterator[str]:
        yield from profile.machine.differences(MeasuredOn.here(self._ledger.machine))

    def _changes_of(self, site: MeasuredSite, preferred: Sequence[KernelSpec]) -> Iterator[str]:
        """What is otherwise of the kernels that could be chosen there."""
        known = {each.kernel: each for each in site.contenders}
        for spec in preferred:
            contender, plugin = known.get(spec.name), self._registry.plugin_of(spec)
            dtypes = checked_dtypes(spec, site.kind)
            now = [self._ledger.machine.checked(spec, plugin, dtype) for dtype in dtypes]
            certified = self._ledger.standing(spec, plugin, dtypes) == HERE
            if contender is None:
                yield f"{spec} was not there"
            elif not contender.checked:
                if certified:
                    yield f"{spec} was not certified, and is now"
            elif list(contender.checked) != now:
                pairs = zip(contender.checked, now, strict=False)
                found = [change for before, after in pairs for change in before.differences(after)]
                yield from dict.fromkeys(found or [f"{spec} was measured in other dtypes"])
            elif contender.times is not None and not certified:
                yield f"{spec} is no longer certified here"


def checked_dtypes(spec: KernelSpec, kind: SiteKind) -> tuple[str, ...]:
    """The dtypes in which ``spec`` must have passed its contract to be measured, and chosen, at sites of ``kind``."""
    return tuple(dtype for dtype in kind.dtypes if dtype in spec.dtypes) or spec.dtypes


def _figures(able: Sequence[Contender], own: str) -> str:
    """The chosen one first, then the others, the fastest first; with their memory, where that decided.

    ``own`` is what the model's own code is set to.
    """
    chosen, fastest = best(able), able[0]
    timed = partial(_timed, own=own)
    order = [chosen, *(each for each in able if each is not chosen)]
    if chosen is fastest:
        return ", ".join(map(timed, order))
    by_memory = f" in {shown_bytes(chosen.peak_bytes)}, within the spread of {timed(fastest)} in "
    rest = "".join(f", {timed(each)}" for each in order[1:] if each is not fastest)
    return f"{timed(chosen)}{by_memory}{shown_bytes(fastest.peak_bytes)}{rest}"


def _timed(contender: Contender, own: str) -> str:
    assert contender.times is not None
    name = f"{EAGER} ({own})" if contender.kernel == EAGER and own != EAGER else contender.kernel
    return f"{name} {shown_ms(contender.times.median)}"


def _shapes_of_others(job: MeasuredJob, hardware: str) -> str:
    """That the model was measured, but not these steps of it here; empty if it never was."""
    others = [f"{other.job.steps} on {other.machine.hardware}" for other in other_profiles(job, hardware)]
    return f"not measured for {job.steps} on {hardware}, but for {' and for '.join(others)}" if others else ""
