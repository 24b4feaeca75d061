"""Measures the CPU time of each test file, prints the dearest ones, and holds ``make test`` to its budget.

CPU time (user and system) of the tests and of the processes that they start; wall time would depend on what else the
machine does. CPU time depends on it too, less: where cores are shared with other machines, the same tests took twice as
many CPU seconds. So the budget grows with the time that a fixed loop takes meanwhile. The loop runs every few seconds:
a shared core may be twice as fast a minute later.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

BUDGET = 1100.0  # CPU seconds of `make test` on a machine on which the loop takes what it should; half more fails it
_LOOP, _LOOP_SECONDS = 1_000_000, 0.037
_EVERY = 5.0  # seconds between two loops, of which a loop is under 2 %
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_SHOWN = 10
_FILES, _TOTAL, _SLOWNESS = "cpu_seconds_by_file", "cpu_seconds", "slowness"


class CpuTime:
    """Counts the CPU seconds of this process, by test file; on the controller of xdist, those of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._spent: Counter[str] = Counter()
        self._elsewhere = 0.0
        self._slowness: list[float] = [slowness()]
        self._measured = time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        before = cpu_seconds()
        ran = yield
        self._spent[item.nodeid.partition("::")[0]] += cpu_seconds() - before
        if time.monotonic() - self._measured > _EVERY:
            self._slowness.append(slowness())
            self._measured = time.monotonic()
        return ran

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            here = {_FILES: dict(self._spent), _TOTAL: cpu_seconds(), _SLOWNESS: self._slowness}
            self._config.workeroutput |= here

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {})
        self._spent.update(output.get(_FILES, {}))
        self._elsewhere += output.get(_TOTAL, 0.0)
        self._slowness += output.get(_SLOWNESS, [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._spent:
            return
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds")
        for file, seconds in self._spent.most_common(_SHOWN):
            write(f"{seconds:7.1f}  {file}")
        write(f"{self.total():7.1f}  in all, with importing and collecting; the budget here is {self.budget():.0f}")
        if self.is_over_budget():
            write(
                f"over the budget of {self.budget():.0f} CPU seconds by more than half. Mark what another test checks "
                "too as thorough (CONTRIBUTING.md, Tests), or make it cheaper",
                red=True,
            )

    def total(self) -> float:
        """Of all workers, where there are any; they are processes of their own, which this one has not waited for."""
        own = os.times()
        return self._elsewhere + own.user + own.system if self._elsewhere else cpu_seconds()

    def budget(self) -> float:
        """In the CPU seconds of this machine, as fast as it was in the meantime."""
        return BUDGET * max(1.0, sum(self._slowness) / len(self._slowness))

    def is_over_budget(self) -> bool:
        return self._config.getoption("suite") == "test" and self.total() > 1.5 * self.budget()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime(config), "suites.cpu_time.counter")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    counter = session.config.pluginmanager.get_plugin("suites.cpu_time.counter")
    if not hasattr(session.config, "workeroutput") and counter.is_over_budget() and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def slowness() -> float:
    """How many times as long a loop of Python takes now as it should, in CPU time."""
    started, count = time.process_time(), 0
    for each in range(_LOOP):
        count += each
    return (time.process_time() - started) / _LOOP_SECONDS


def cpu_seconds() -> float:
    """Of this process, of the children that have ended, and of the server of forks with those of its own."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _fork_server_seconds()


def _fork_server_seconds() -> float:
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    stat = Path(f"/proc/{pid}/stat")
    if pid is None or not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS  # utime, stime, cutime and cstime of proc(5)
