"""The simulated NPU for tests that need a device; a test marked ``npu`` runs on a real one instead."""

from __future__ import annotations

import pytest

from npu_sim import simulated_npu


@pytest.fixture
def npu():
    """One simulated Ascend 910B, with torch_npu installed."""
    with simulated_npu():
        yield "npu"
