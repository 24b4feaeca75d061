"""What the loop measures of a step: its time without pauses, and the peak of memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from veomni_trainer.loop.measures import StepClock, peak_memory


def test_the_clock_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = StepClock()
    for _ in range(2):
        clock.start()
        clock.count(50)
        now += 2.0
        clock.end_step()
        now += 100.0  # a checkpoint
        clock.forget_pause()
    assert clock.read() == {"step_seconds": 2.0, "tokens_per_second": 25.0}
    now += 3.0
    clock.end_step()
    assert clock.read() == {"step_seconds": 3.0, "tokens_per_second": 0.0}


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's own account")
def test_a_child_does_not_report_its_parents_peak_of_memory() -> None:
    code = "import torch; from veomni_trainer.loop.measures import peak_memory; print(peak_memory(torch.device('cpu')))"
    held = np.ones(100_000_000)
    here = peak_memory(torch.device("cpu"))
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert held.nbytes < here
    assert 10_000_000 < child < here - held.nbytes / 2
