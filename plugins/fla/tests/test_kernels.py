"""Every kernel against its op's contract, on a GPU, with the library that it calls; else it is skipped, with why."""

from __future__ import annotations

import pytest

from veomni_core.testing import KernelConformance


@pytest.mark.gpu
class TestOnAGpu(KernelConformance):
    plugin = "veomni-fla"
