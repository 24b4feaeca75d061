"""Two trainings that take turns: one step each, and alone where the other one has ended."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from veomni_trainer.run.eager import AlternatingSteps

CPU: Any = SimpleNamespace(device=torch.device("cpu"))


@pytest.fixture
def both() -> tuple[AlternatingSteps, AlternatingSteps]:
    """The turns of the process that begins, and those of the other one."""
    (a, b), (c, d) = os.pipe(), os.pipe()
    return AlternatingSteps(c, b, first=True), AlternatingSteps(a, d, first=False)


def _train(turns: AlternatingSteps, name: str, steps: int, log: list[str]) -> None:
    for step in range(1, steps + 1):
        turns.on_step_begin(CPU)
        log.append(f"{name}{step}")
    turns.end()


@pytest.mark.parametrize("steps", [(3, 3), (2, 4), (4, 1)])
def test_steps_alternate_until_one_has_done_its_last(
    both: tuple[AlternatingSteps, AlternatingSteps], steps: tuple[int, int]
) -> None:
    log: list[str] = []
    lost: list[str] = []
    other = threading.Thread(target=_train, args=(both[1], "b", steps[1], log))
    for turns in both:
        turns.on_lost = lambda: lost.append("lost")
    other.start()
    _train(both[0], "a", steps[0], log)
    other.join(20)
    common = min(steps)
    assert log[: 2 * common] == [f"{name}{step}" for step in range(1, common + 1) for name in "ab"]
    assert len(log) == sum(steps) and lost == []


def test_a_process_that_dies_is_missed_once_and_its_wait_counted() -> None:
    (hears, sent), (received, sends) = os.pipe(), os.pipe()
    turns, lost, waits = AlternatingSteps(hears, sends, first=False), [], []
    turns.on_lost, turns.on_wait = lambda: lost.append(True), waits.append
    os.write(sent, b".")
    turns.on_step_begin(CPU)
    os.close(sent)
    os.close(received)
    for _ in range(2):
        turns.on_step_begin(CPU)
    turns.end()
    assert (lost, len(waits)) == ([True], 2)
