"""The report of a conformance check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from veomni_core.errors import ConformanceError

_NEAR = 0.8  # of the tolerance
_FEW = 3  # samples


@dataclass(frozen=True)
class CaseResult:
    """The result on one sample.

    Attributes:
        sample: the sample's name.
        failures: one sentence per failure.
        worst_value, worst_gradient: the largest error, as a share of the tolerance (1.0 is the tolerance).
        call: of a case that failed, the call's shapes, options and numbers, as ``x (3, 97), eps=1e-06``.

    Example:
        >>> case = CaseResult("odd width", failures=(), worst_value=0.25)
        >>> case.with_failures(["wrote into its input x"])
        CaseResult(sample='odd width', failures=('wrote into its input x',), worst_value=0.25, worst_gradient=0.0)
    """

    sample: str
    failures: tuple[str, ...]
    worst_value: float = 0.0
    worst_gradient: float = 0.0
    call: str = field(default="", repr=False)

    def with_failures(self, failures: Iterable[str]) -> CaseResult:
        """A copy of this case with more failures."""
        return replace(self, failures=(*self.failures, *failures))


@dataclass(frozen=True)
class ConformanceReport:
    """The results of one kernel on one device in one dtype, one case per sample.

    Attributes:
        kernel: the kernel, as ``op/variant:name``.
        device, dtype: where and in which dtype it ran.
        cases: the results.
        skipped: in words, which kinds of samples did not run.
        seconds: what the time went to: ``compiling``, the ``kernel``, the ``reference``, ``comparing``, and ``other``.

    Example:
        >>> cases = (CaseResult("odd width", ()), CaseResult("no rows", ("raised ZeroDivisionError",)))
        >>> report = ConformanceReport("rms_norm/standard:acme", "cpu", "float32", cases)
        >>> report.ok, report.failures
        (False, ("sample 'no rows': raised ZeroDivisionError",))
        >>> report.raise_if_failed()
        Traceback (most recent call last):
            ...
        veomni_core.errors.ConformanceError: rms_norm/standard:acme on cpu in float32 breaks its contract:
          sample 'no rows': raised ZeroDivisionError
    """

    kernel: str
    device: str
    dtype: str
    cases: tuple[CaseResult, ...]
    skipped: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every sample passed. False if there was no sample."""
        return bool(self.cases) and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence per failure, with the sample's name and what it calls the kernel with.

        What more than a few samples fail alike in is said once, of the first of them.
        """
        having: dict[str, list[CaseResult]] = {}
        for case in self.cases:
            for failure in case.failures:
                having.setdefault(failure, []).append(case)
        return tuple(
            f"sample {case.sample!r}: {failure}{f' [{case.call}]' if case.call else ''}"
            f"{f', and {len(cases) - 1} more samples alike' if len(cases) > _FEW else ''}"
            for failure, cases in having.items()
            for case in (cases[:1] if len(cases) > _FEW else cases)
        )

    @property
    def near(self) -> tuple[str, ...]:
        """One sentence per sample that passed near the limit: where something rounds otherwise, it may fail."""
        shares = ((case.sample, max(case.worst_value, case.worst_gradient)) for case in self.cases if not case.failures)
        return tuple(f"sample {name!r} is at {share:.0%} of its tolerance" for name, share in shares if share > _NEAR)

    @property
    def shares(self) -> dict[str, tuple[float, float]]:
        """For each case, the largest error of the values and of the gradients, as shares of the tolerance."""
        return {case.sample: (case.worst_value, case.worst_gradient) for case in self.cases}

    def raise_if_failed(self) -> None:
        """Raise :class:`~veomni_core.errors.ConformanceError` with every failure, unless the report is ``ok``."""
        if not self.ok:
            lines = "\n  ".join(self.failures or ("its contract has no samples",))
            raise ConformanceError(f"{self.kernel} on {self.device} in {self.dtype} breaks its contract:\n  {lines}")

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {**asdict(self), "ok": self.ok}
