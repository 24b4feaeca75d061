"""The device that tests run on: the simulated NPU, and a real one where there is one."""

from __future__ import annotations

import pytest

from npu_sim import simulated_npu


@pytest.fixture
def simulated():
    """One simulated Ascend 910B, with torch_npu installed."""
    with simulated_npu():
        yield "npu"


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.npu)])
def npu(request):
    """The simulated NPU, then the real one."""
    return "npu" if request.param == "real" else request.getfixturevalue("simulated")
