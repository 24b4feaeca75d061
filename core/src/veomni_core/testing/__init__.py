"""The conformance kit: one harness for plugins' tests, ``veomni verify``, the check at bind time and the benchmarks."""

from veomni_core.testing.conformance import check_kernel
from veomni_core.testing.report import CaseResult, ConformanceReport

__all__ = ["CaseResult", "ConformanceReport", "check_kernel"]
