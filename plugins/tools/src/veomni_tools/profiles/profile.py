"""A profile: how long each kernel took at the sites of one model, on one machine; and which is the best of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from veomni_conformance.this_machine import CheckedKernel
from veomni_tools.profiles.measured_job import MeasuredJob, MeasuredOn
from veomni_tools.profiles.site_kind import SiteKind

FORMAT = 1
_SHORT = 8  # digits of a profile's hash, in messages


@dataclass(frozen=True)
class Times:
    """Milliseconds of a forward and backward: the median, and the 20th and 80th percentile, which are the spread."""

    median: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.median <= self.high < float("inf"):
            raise ValueError(f"times must rise from low over median to high, got {self!r}")


@dataclass(frozen=True)
class Contender:
    """A kernel, or the model's own code, at one kind of site.

    Attributes:
        kernel: its name; ``eager`` for the model's own code.
        checked: the kernel with its plugin, as it was when it had passed its contract; one for each dtype.
        times: how long it took; ``None`` if it was not measured.
        peak_bytes: the most memory that a forward and backward held beyond what was there before.
        why_not: why it was not measured; empty if it was.
    """

    kernel: str
    checked: tuple[CheckedKernel, ...] = ()
    times: Times | None = None
    peak_bytes: int = 0
    why_not: str = ""

    def __post_init__(self) -> None:
        if (self.times is None) != bool(self.why_not):
            raise ValueError(f"{self.kernel} must have times, or why there are none")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contender:
        """The contender that ``asdict`` turned into ``data``."""
        times = None if data["times"] is None else Times(**{name: float(ms) for name, ms in data["times"].items()})
        checked = tuple(CheckedKernel(**each) for each in data["checked"])
        return cls(str(data["kernel"]), checked, times, int(data["peak_bytes"]), str(data["why_not"]))


@dataclass(frozen=True)
class MeasuredSite:
    """What was measured at one kind of site.

    Attributes:
        kind: the kind.
        sites: how many sites of the model are of it.
        timed: what one call was, in words.
        shapes: the shapes and dtypes of its tensors.
        contenders: the kernels, and the model's own code.
    """

    kind: SiteKind
    sites: int
    timed: str
    shapes: str
    contenders: tuple[Contender, ...]

    @property
    def measured(self) -> tuple[Contender, ...]:
        """The contenders with times, the fastest first."""
        timed = [each for each in self.contenders if each.times is not None]
        return tuple(sorted(timed, key=lambda each: (_median(each), each.kernel)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredSite:
        """The site that :meth:`Profile.to_json` wrote."""
        contenders = tuple(map(Contender.from_dict, data["contenders"]))
        kind, words = SiteKind.from_dict(data["kind"]), {name: str(data[name]) for name in ("timed", "shapes")}
        return cls(kind, int(data["sites"]), **words, contenders=contenders)


@dataclass(frozen=True)
class Profile:
    """What ``veomni tune`` measured of one model on one machine.

    Attributes:
        job: the model, and the shape of its steps.
        machine: where.
        date: when, as ``2026-11-24``.
        sites: the kinds of sites.
    """

    job: MeasuredJob
    machine: MeasuredOn
    date: str
    sites: tuple[MeasuredSite, ...]

    def at(self, kind: SiteKind) -> MeasuredSite | None:
        """What was measured at sites of this kind."""
        return next((site for site in self.sites if site.kind == kind), None)

    @property
    def digest(self) -> str:
        """A short hash of all that is in it, by which plans name it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:_SHORT]

    def to_json(self) -> str:
        """All that is in it."""
        data = {
            "format": FORMAT,
            "job": self.job.to_dict(),
            "machine": self.machine.to_dict(),
            "date": self.date,
            "sites": [{**asdict(site), "kind": site.kind.to_dict()} for site in self.sites],
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that :meth:`to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is none.
        """
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, and this version reads {FORMAT}")
        sites = tuple(map(MeasuredSite.from_dict, data["sites"]))
        job, machine = MeasuredJob.from_dict(data["job"]), MeasuredOn.from_dict(data["machine"])
        return cls(job, machine, str(data["date"]), sites)


def best(measured: Sequence[Contender]) -> Contender:
    """The fastest of the ``measured``; of those that it doesn't beat beyond the spread, the one with the least memory.

    Example:
        >>> slow = Contender("slow", times=Times(3.0, 2.9, 3.1), peak_bytes=10)
        >>> fast = Contender("fast", times=Times(1.0, 0.9, 1.1), peak_bytes=30)
        >>> tied = Contender("tied", times=Times(1.05, 1.0, 1.2), peak_bytes=20)
        >>> best([slow, fast]).kernel, best([slow, fast, tied]).kernel
        ('fast', 'tied')
    """
    fastest = min(measured, key=lambda each: (_median(each), each.kernel))
    tied = [each for each in measured if is_tied(each, fastest)]
    return min(tied, key=lambda each: (each.peak_bytes, _median(each), each.kernel))


def is_tied(one: Contender, fastest: Contender) -> bool:
    """Whether the spreads of both meet, so that another run might order them otherwise."""
    return one.times is not None and fastest.times is not None and one.times.low <= fastest.times.high


def shown_bytes(count: int) -> str:
    """``3.4 MiB``, in the largest unit of which there is one.

    Example:
        >>> shown_bytes(900), shown_bytes(3_565_158)
        ('900 B', '3.4 MiB')
    """
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def shown_ms(milliseconds: float) -> str:
    """``1.23 ms``, with three digits that count.

    Example:
        >>> shown_ms(0.012345), shown_ms(1.2345), shown_ms(1234.5)
        ('0.0123 ms', '1.23 ms', '1234 ms')
    """
    digits = max(0, 2 - len(str(int(milliseconds))) + 1) if milliseconds >= 1 else 3
    return f"{milliseconds:.{digits}f} ms" if milliseconds >= 0.1 else f"{milliseconds:.3g} ms"


def _median(contender: Contender) -> float:
    return contender.times.median if contender.times else float("inf")
