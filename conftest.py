"""What every distribution's tests share: tests that need a device which isn't here are skipped, with the reason.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _missing_device(marker: str) -> str | None:
    if marker == "gpu":
        return None if torch.cuda.is_available() else "needs a CUDA GPU; torch sees none here"
    return None if hasattr(torch, "npu") and torch.npu.is_available() else "needs an Ascend NPU; torch sees none here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker in ("gpu", "npu"):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = _missing_device(marker) if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure() -> None:
    """The simulated NPU joins PyTorch's devices before any backward: autograd counts them when it first runs."""
    if not hasattr(torch, "npu"):
        from npu_sim.backend import start

        start()


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.npu)])
def npu(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device type of an Ascend NPU: simulated where there is none, and the machine's own where there is one."""
    here = _missing_device("npu") is None
    if request.param == "real":
        yield "npu"
    elif here:
        pytest.skip("an Ascend NPU is here; PyTorch can't have a simulated one beside it")
    else:
        from npu_sim import simulated_npu

        with simulated_npu():
            yield "npu"
