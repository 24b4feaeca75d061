"""Every kernel against its contract, on the simulated NPU and, where there is one, on a real one."""

from __future__ import annotations

import pytest

from veomni_core.testing import check_kernel
from veomni_npu.plugin import veomni_kernels

CASES = [pytest.param(spec, dtype, id=f"{spec}-{dtype}") for spec in veomni_kernels() for dtype in spec.dtypes]


@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance(npu, spec, dtype):
    check_kernel(spec, npu, dtype).raise_if_failed()


@pytest.mark.npu
@pytest.mark.parametrize("spec, dtype", CASES)
def test_conformance_on_an_npu(spec, dtype):
    check_kernel(spec, "npu", dtype).raise_if_failed()
