"""What authors hold kernels to: contracts, and the check that plugins' tests, ``veomni verify`` and ``bind`` run.

- A contract: ``Contract``, ``Sample``, ``Tolerance``, ``Draw``, ``leaf``, ``compute_dtype``.
- A contract of calls that several ranks make together: ``RankContract`` with ``RankSample``.
- The check: ``check_kernel`` gives a ``ConformanceReport`` with a ``CaseResult`` of each sample; ``KernelConformance``
  runs it as tests.

Each name is imported on first use: the plugin and the command line describe themselves without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veomni_conformance.conformance import check_kernel
    from veomni_conformance.kernel_conformance import KernelConformance
    from veomni_conformance.report import CaseResult, ConformanceReport
    from veomni_ops.contract import Contract, Draw, Sample, Tolerance, compute_dtype, leaf
    from veomni_ops.rank_contract import RankContract, RankSample

_HOME = {
    "CaseResult": "veomni_conformance.report",
    "ConformanceReport": "veomni_conformance.report",
    "Contract": "veomni_ops.contract",
    "Draw": "veomni_ops.contract",
    "KernelConformance": "veomni_conformance.kernel_conformance",
    "RankContract": "veomni_ops.rank_contract",
    "RankSample": "veomni_ops.rank_contract",
    "Sample": "veomni_ops.contract",
    "Tolerance": "veomni_ops.contract",
    "check_kernel": "veomni_conformance.conformance",
    "compute_dtype": "veomni_ops.contract",
    "leaf": "veomni_ops.contract",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'veomni_conformance' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
