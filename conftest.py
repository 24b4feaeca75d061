"""What every distribution's tests share: tests that need a device which isn't here are skipped, with the reason.

Without a GPU, Triton's kernels run in its interpreter, which must be chosen before triton is imported.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

# Before torch counts the cores: threads wait for one another on tiny tensors, and the more so beside other workers. A
# file of contracts took twelve times as many CPU seconds with two threads on two busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of those that a check starts

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Which tests a command runs, what they cost, and Triton's interpreter at several times its speed. An sdist has one
# distribution's tests, and runs them all, in the interpreter as it is.
pytest_plugins = (
    ["suites.selection", "suites.cpu_time", "fast_interpreter"] if importlib.util.find_spec("suites") else []
)

# No test asserts a time, and hypothesis would: 200 ms for one example.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("without a deadline", deadline=None)
    settings.load_profile("without a deadline")

# What is printed depends on no terminal: readline, which pytest imports, sets the width for the workers of xdist.
os.environ.pop("COLUMNS", None)

# No test reads or writes the developer's own cache: kernels that failed `veomni verify`, and tokens. Subprocesses
# inherit it.
_CACHES = tempfile.mkdtemp(prefix="veomni-cache-")
atexit.register(shutil.rmtree, _CACHES, ignore_errors=True)
os.environ["VEOMNI_CACHE"] = f"{_CACHES}/shared"
_numbers = itertools.count()


def _npu_is_here() -> bool:
    return hasattr(torch, "npu") and torch.npu.is_available()


def _reason_to_skip(marker: str) -> str | None:
    if marker == "gpu":
        return None if torch.cuda.is_available() else "needs a CUDA GPU; torch sees none here"
    if marker == "npu":
        return None if _npu_is_here() else "needs an Ascend NPU; torch sees none here"
    if importlib.util.find_spec("npu_sim") is None:
        return "the simulated NPU is not in this sdist"
    if torch.cuda.is_available() or _npu_is_here():
        return "an accelerator is here, and PyTorch's autograd serves one kind of them: no simulated NPU beside it"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker in ("gpu", "npu", "npu_simulated"):
        if reason := _reason_to_skip(marker):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A dear test that begins last leaves the other workers waiting for it.
        items.sort(key=lambda item: item.get_closest_marker("thorough") is None)


def pytest_collection_finish() -> None:
    """Keep what was imported out of each later collection: accelerate makes one per training, of 0.3 s without this."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """The simulated NPU joins PyTorch's devices before any backward: autograd counts them when it first runs."""
    if _reason_to_skip("npu_simulated") is None:
        from npu_sim.backend import start

        start()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test verifies is not remembered in the next."""
    monkeypatch.setenv("VEOMNI_CACHE", f"{_CACHES}/{next(_numbers)}")


@pytest.fixture
def extent(request: pytest.FixtureRequest) -> dict[str, Any]:
    """For ``check_kernel``: ``make test`` takes small samples, and one of all forms in the situations of training."""
    if request.config.getoption("suite", default="all") != "test":
        return {}
    from veomni_ops.contract import Size

    return {"largest": Size.SMALL, "every_form": False}


_SIMULATED = pytest.param("simulated", marks=pytest.mark.npu_simulated)


@pytest.fixture(params=[_SIMULATED, pytest.param("real", marks=pytest.mark.npu)])
def npu(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device type of an Ascend NPU: simulated where there is no accelerator, and the machine's own where it is."""
    if request.param == "real":
        yield "npu"
    else:
        from npu_sim import simulated_npu

        with simulated_npu():
            yield "npu"
