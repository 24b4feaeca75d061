"""What a conformance check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from veomni_core.errors import ConformanceError


@dataclass(frozen=True)
class CaseResult:
    """One sample: what was wrong with it, and the worst error seen as a share of what is allowed."""

    sample: str
    failures: tuple[str, ...]
    worst_value: float = 0.0
    worst_gradient: float = 0.0

    def with_failures(self, failures: Iterable[str]) -> CaseResult:
        """This case with more of them."""
        return replace(self, failures=(*self.failures, *failures))


@dataclass(frozen=True)
class ConformanceReport:
    """All samples of one kernel on one device in one dtype; ``skipped`` says which kinds of samples did not run."""

    kernel: str
    device: str
    dtype: str
    cases: tuple[CaseResult, ...]
    skipped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every sample passed, and there was one."""
        return bool(self.cases) and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence per thing that was wrong."""
        return tuple(f"sample {case.sample!r}: {failure}" for case in self.cases for failure in case.failures)

    def raise_if_failed(self) -> None:
        """Raise :class:`ConformanceError` with every failure, unless all is well."""
        if not self.ok:
            lines = "\n  ".join(self.failures or ("its contract has no samples",))
            raise ConformanceError(f"{self.kernel} on {self.device} in {self.dtype} breaks its contract:\n  {lines}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "ok": self.ok}
