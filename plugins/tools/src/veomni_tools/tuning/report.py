"""What was measured, as a table: who won at each kind of site, and by how much."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_core.tables import fit, render_table
from veomni_tools.profiles.profile import Contender, MeasuredSite, Profile, best, is_tied, shown_bytes, shown_ms
from veomni_tools.profiles.site_kind import SiteKind

_BAR, _WIDEST = "█", 10


@dataclass(frozen=True)
class Outcome:
    """Who won at one kind of site.

    Attributes:
        site: what was measured there.
        by_rank: what ``auto`` takes there by declared preferences.
        able: the measured contenders that it may take, the fastest first.
    """

    site: MeasuredSite
    by_rank: str
    able: tuple[Contender, ...]

    @property
    def chosen(self) -> Contender | None:
        """What ``auto`` takes by these figures; ``None`` where nothing was measured."""
        return best(self.able) if self.able else None

    @property
    def saved_ms(self) -> float:
        """Milliseconds of a step by which all sites of this kind are faster than by rank; below 0 where memory won."""
        return self.site.sites * (self._median(self.by_rank) - self._median(self.chosen.kernel)) if self.chosen else 0.0

    def sentence(self) -> str:
        """Who won, by how much over the next one, and over the choice by rank."""
        if self.chosen is None:
            return f"not measured, so {self.by_rank} by rank"
        return "; ".join([self._shown(self.chosen), *self._over_the_others(self.chosen), *self._over_the_ranks()])

    def _over_the_others(self, chosen: Contender) -> Iterator[str]:
        """Why it is taken: it is the fastest, or as fast as that and in less memory."""
        fastest = self.able[0]
        if chosen is not fastest:
            memory = f"{shown_bytes(chosen.peak_bytes)} in place of {shown_bytes(fastest.peak_bytes)}"
            yield f"within the spread of {self._shown(fastest)}, and {memory}"
            return
        for runner_up in self.able[1:2]:
            tie = ", within the spread" if is_tied(runner_up, chosen) else ""
            rank = ", the choice by rank" if runner_up.kernel == self.by_rank else ""
            yield f"{self._times_as_fast_as(runner_up.kernel)} as fast as {self._shown(runner_up)}{tie}{rank}"

    def _over_the_ranks(self) -> Iterator[str]:
        """What that is against the choice by rank, where it is not the runner-up."""
        if self.chosen is not None and self.by_rank == self.chosen.kernel:
            yield "as by rank"
            return
        others = {each.kernel: each for each in self.able}
        if self.by_rank not in others:
            yield f"by rank {self.by_rank}, which was not measured"
        elif self.chosen is not self.able[0] or self.able[1].kernel != self.by_rank:
            by_rank = self._shown(others[self.by_rank])
            yield f"{self._times_as_fast_as(self.by_rank)} as fast as {by_rank}, the choice by rank"

    def _shown(self, contender: Contender) -> str:
        return shown_kernel(contender, self.site)

    def _times_as_fast_as(self, other: str) -> str:
        assert self.chosen is not None
        return f"{self._median(other) / self._median(self.chosen.kernel):.2f}x"

    def _median(self, kernel: str) -> float:
        """Of a kernel that was not measured, that of the chosen one: nothing is claimed of it."""
        times = next((each.times for each in self.site.measured if each.kernel == kernel), None)
        chosen = self.chosen.times if self.chosen else None
        found = times or chosen
        return found.median if found else 0.0


def outcomes(profile: Profile, by_rank: Mapping[SiteKind, str], never_taken: Collection[str]) -> tuple[Outcome, ...]:
    """The outcome at each kind of site.

    Args:
        profile: what was measured.
        by_rank: what ``auto`` takes by declared preferences.
        never_taken: the kernels, as ``op/variant:name``, that ``auto`` never takes, as their preference says.
    """
    found = []
    for site in profile.sites:
        of_op = f"{site.kind.op_name}/{site.kind.variant}:"
        able = tuple(each for each in site.measured if f"{of_op}{each.kernel}" not in never_taken)
        found.append(Outcome(site, by_rank[site.kind], able))
    return tuple(found)


def table(profile: Profile, found: tuple[Outcome, ...]) -> str:
    """The outcomes as text: a bar for each contender, and who won; then what was not measured, and why."""
    rows = []
    for each in found:
        kind = each.site.kind
        what = "\n".join([f"{kind.op_name}/{kind.variant}", kind.where or "the model", " or ".join(kind.dtypes)])
        lines, memory = _bars(each.site), "\n".join(shown_bytes(c.peak_bytes) for c in each.site.measured)
        rows.append((what, str(each.site.sites), lines, memory, each.sentence()))
    title = f"Forward and backward of {profile.job} on {profile.machine.processor or profile.machine.hardware}"
    head = ("op/variant, where, dtype", "sites", "median, spread", "memory", "auto takes")
    notes = [
        f"{each.site.kind}: auto never takes {_listed(each)}, by their preference" for each in found if _listed(each)
    ]
    notes += [
        f"{site.kind}: {c.kernel} was not measured: {c.why_not}"
        for site in profile.sites
        for c in site.contenders
        if c.times is None
    ]
    saved = sum(each.saved_ms for each in found)
    compared = "less" if saved >= 0 else "more"
    notes.append(f"All sites together: {shown_ms(abs(saved))} {compared} in a step than by declared ranks.")
    return "\n".join([render_table(head, rows, title), *map(fit, notes)])


def _bars(site: MeasuredSite) -> str:
    """A line for each contender, the fastest first. The slowest has the longest bar."""
    measured = site.measured
    longest = max((each.times.median for each in measured if each.times), default=1.0)
    width = max((len(shown_kernel(each, site)) for each in measured), default=0)
    lines = []
    for each in measured:
        if (times := each.times) is not None:
            bar = _BAR * max(1, round(_WIDEST * times.median / longest))
            spread = f"({times.low:.3g}-{times.high:.3g})"
            lines.append(f"{shown_kernel(each, site):{width}} {bar} {shown_ms(times.median)} {spread}")
    return "\n".join(lines)


def shown_kernel(contender: Contender, site: MeasuredSite) -> str:
    """The kernel's name; for the model's own code with what the model is set to, such as ``sdpa``."""
    own = site.kind.own
    return f"{EAGER} ({own})" if contender.kernel == EAGER and own != EAGER else contender.kernel


def _listed(outcome: Outcome) -> str:
    """The contenders that were measured and are never taken."""
    return " and ".join(each.kernel for each in outcome.site.measured if each not in outcome.able)
