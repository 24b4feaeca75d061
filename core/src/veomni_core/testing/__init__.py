"""The conformance check, used by plugins' tests, by ``veomni verify``, by ``bind(verify=True)`` and by benchmarks."""

from veomni_core.testing.conformance import check_kernel
from veomni_core.testing.kernel_conformance import KernelConformance
from veomni_core.testing.report import CaseResult, ConformanceReport

__all__ = ["CaseResult", "ConformanceReport", "KernelConformance", "check_kernel"]
