"""What authors hold kernels to: contracts, and the check that plugins' tests, ``veomni verify`` and ``bind`` run.

- A contract: ``Contract``, ``Sample``, ``Tolerance``, ``Draw``, ``leaf``, ``compute_dtype``.
- A contract of calls that several ranks make together: ``RankContract`` with ``RankSample``.
- The check: ``check_kernel`` gives a ``ConformanceReport`` with a ``CaseResult`` of each sample; ``KernelConformance``
  runs it as tests.
"""

from veomni_conformance.conformance import check_kernel
from veomni_conformance.kernel_conformance import KernelConformance
from veomni_conformance.report import CaseResult, ConformanceReport
from veomni_ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype, leaf
from veomni_ops.rank_contract import RankContract, RankSample

__all__ = [
    "CaseResult",
    "ConformanceReport",
    "Contract",
    "Draw",
    "KernelConformance",
    "RankContract",
    "RankSample",
    "Sample",
    "Tolerance",
    "check_kernel",
    "compute_dtype",
    "leaf",
]
