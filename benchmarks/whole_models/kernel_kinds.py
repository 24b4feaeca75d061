"""The kinds of kernels that a training step's time is shared out to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from benchmarks.shared.gpu_kernels import IDLE

# The first pattern found in a kernel's name says its kind. Triton's products are veomni-triton-moe's.
KINDS: Mapping[str, str] = {
    "attention": r"flash|fmha|sdpa|attention",
    "matrix products": r"gemm|nvjet|cutlass|cublas|^_(gate_up|row_product|weight_gradient)$",
}
OTHER = "other kernels"


def by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """:func:`~benchmarks.shared.gpu_kernels.kernel_times` by kind of kernel; what no pattern names is :data:`OTHER`."""
    sums = dict.fromkeys((*KINDS, OTHER, IDLE), 0.0)
    for name, time in times.items():
        kinds = [kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)]
        sums[IDLE if name == IDLE else (*kinds, OTHER)[0]] += time
    return sums
