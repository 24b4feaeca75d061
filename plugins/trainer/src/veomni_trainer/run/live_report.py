"""Rewrites the report while a job runs, seldom enough that it costs little."""

from __future__ import annotations

import time

from veomni_trainer.output.folder import RunFolder
from veomni_trainer.report.ending import RunEnding
from veomni_trainer.report.write import write_report

_SECONDS_BETWEEN = 30.0
_LARGEST_SHARE = 0.02  # of the time that a run takes


class LiveReport:
    """Writes a run's report at most every half minute, and at most a fiftieth of the time.

    Validations don't wait for the half minute.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._rested = time.monotonic()
        self._cost = 0.0

    def update(self, soon: bool) -> None:
        """Write the report if it is due.

        Args:
            soon: whether there is something new that is worth a report of its own.
        """
        began = time.monotonic()
        rest = self._cost / _LARGEST_SHARE
        if began - self._rested < (rest if soon and self._cost else max(rest, _SECONDS_BETWEEN)):
            return
        write_report(self._folder, RunEnding("running"))
        self._rested = time.monotonic()
        self._cost = self._rested - began
