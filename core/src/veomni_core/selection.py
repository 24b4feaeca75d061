"""Judges kernels: which of those that a field names can run at a site, and why the others can't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from veomni_core.config import AUTO
from veomni_core.hardware import Hardware
from veomni_core.registry import Registry
from veomni_core.sites.site import Site
from veomni_core.spec import EAGER, KernelSpec


@dataclass(frozen=True)
class Verdict:
    """The name of what runs at a site, why it is that, and whether the config names just that."""

    kernel: str
    reason: str
    as_asked: bool


@dataclass(frozen=True)
class _Place:
    """What of a site a kernel's usability depends on."""

    variant: str
    dtype: str | None
    needs: tuple[str, ...]
    refuses: tuple[tuple[str, str], ...]


class Selection:
    """Answers for one registry on one hardware. Equal questions are answered once."""

    def __init__(self, registry: Registry, hardware: Hardware, profile: Mapping[str, Mapping[str, float]]) -> None:
        self._registry, self._hardware, self._profile = registry, hardware, profile
        self._answers: dict[tuple[str, tuple[str, ...], _Place], Verdict] = {}

    def choose(self, op_name: str, names: tuple[str, ...], site: Site) -> Verdict:
        """The first of ``names`` that can run at ``site``; ``eager`` with every reason where none can."""
        if names[0] == EAGER:
            return Verdict(EAGER, "as asked", as_asked=True)
        if site.variant is None:
            return Verdict(EAGER, f"not proven: {site.evidence}", as_asked=False)
        place = _Place(site.variant, site.dtype, site.needs, tuple(site.refuses.items()))
        key = (op_name, names, place)
        if key not in self._answers:
            self._answers[key] = self._first(op_name, names, place)
        return self._answers[key]

    def leaves_open(self, names: tuple[str, ...]) -> bool:
        """Whether ``names`` allow the model's own code, so that nothing is refused."""
        return EAGER in names or AUTO in names

    def unavailable(self, op_name: str, names: tuple[str, ...]) -> str:
        """Why none of ``names`` can run on this hardware whatever the site, with what could; empty when one can."""
        reasons = []
        for name in names:
            reason = self._why_not_here(op_name, name)
            if not reason:
                return ""
            reasons.append(reason)
        return f"{'; '.join(reasons).rstrip('.')}. Usable: {', '.join(self.usable(op_name))}."

    def usable(self, op_name: str) -> tuple[str, ...]:
        """Every value that would be accepted for ``op_name`` here."""
        names = {spec.name for spec in self._registry.list_available(op_name, None, self._hardware) if spec.backward}
        return (EAGER, *sorted(names))

    def why_not(
        self,
        spec: KernelSpec,
        dtype: str | None = None,
        needs: tuple[str, ...] = (),
        refuses: tuple[tuple[str, str], ...] = (),
    ) -> tuple[str, ...]:
        """What keeps ``spec`` from running here, on data of ``dtype`` where that is known, where a site ``needs`` some
        features and ``refuses`` others; empty when nothing does.
        """
        reasons = list(spec.hardware.unmet(self._hardware))
        if not spec.backward:
            reasons.append("has no backward, and training needs one")
        if dtype is not None and dtype not in spec.dtypes:
            reasons.append(f"computes {', '.join(spec.dtypes)}, this site is {dtype}")
        reasons += [f"does not compute {need}, which this site needs" for need in needs if need not in spec.features]
        reasons += [f"has {feature}: {why}" for feature, why in refuses if feature in spec.features]
        return tuple(reasons)

    def _first(self, op_name: str, names: tuple[str, ...], place: _Place) -> Verdict:
        passed_over: list[str] = []
        for name in names:
            if name == EAGER:
                return Verdict(EAGER, _after(passed_over, "as asked"), as_asked=True)
            if name == AUTO:
                return self._best(op_name, place, passed_over)
            spec = self._registry.find(op_name, place.variant, name)
            covered = (self._not_covered(op_name, place.variant, name),)
            why_not = self.why_not(spec, place.dtype, place.needs, place.refuses) if spec else covered
            if not why_not:
                return Verdict(name, _after(passed_over, "as asked"), as_asked=True)
            passed_over.append(f"{name} {' and '.join(why_not)}")
        return Verdict(EAGER, "; ".join(passed_over), as_asked=False)

    def _best(self, op_name: str, place: _Place, passed_over: list[str]) -> Verdict:
        specs = self._registry.kernels(op_name, place.variant)
        candidates = [spec for spec in specs if not self.why_not(spec, place.dtype, place.needs, place.refuses)]
        times = self._profile.get(op_name, {})
        measured = [(times[name], name) for name in (EAGER, *(spec.name for spec in candidates)) if name in times]
        if measured:
            milliseconds, name = min(measured)
            return Verdict(name, _after(passed_over, f"the fastest measured, {milliseconds:g} ms"), as_asked=False)
        ranked = sorted((-spec.preference, spec.name) for spec in candidates if spec.preference > 0)
        if not ranked:
            return Verdict(EAGER, _after(passed_over, self._why_none(op_name, place)), as_asked=False)
        preference, name = -ranked[0][0], ranked[0][1]
        reason = f"the highest preference ({preference}) of {len(ranked)} usable here"
        return Verdict(name, _after(passed_over, reason), as_asked=False)

    def _why_none(self, op_name: str, place: _Place) -> str:
        specs = self._registry.kernels(op_name, place.variant)
        if not specs:
            return f"no kernel for {place.variant} is installed"
        not_preferred = ("is not preferred to the model's own code",)
        return "; ".join(
            f"{spec.name} {' and '.join(self.why_not(spec, place.dtype, place.needs, place.refuses) or not_preferred)}"
            for spec in specs
        )

    def _not_covered(self, op_name: str, variant: str, name: str) -> str:
        covered = sorted({spec.variant for spec in self._registry.kernels(op_name) if spec.name == name})
        if covered:
            return f"covers {', '.join(covered)}, not {variant}"
        return self._registry.absence(op_name, name) or "is not known"

    def _why_not_here(self, op_name: str, name: str) -> str:
        specs = [spec for spec in self._registry.kernels(op_name) if spec.name == name]
        if not specs:
            return self._registry.absence(op_name, name) or f"{name} is not known"
        reasons = [self.why_not(spec) for spec in specs]
        if not all(reasons):
            return ""
        return f"{name} can't run here: {' and '.join(dict.fromkeys(reason for some in reasons for reason in some))}"


def _after(passed_over: list[str], reason: str) -> str:
    return f"{reason}, after: {'; '.join(passed_over)}" if passed_over else reason
