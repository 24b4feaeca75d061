"""A pytest plugin that writes which test failed first, and when, to the file that ``FAULTS_FIRST_FAILURE`` names.

The summary of a run shows names too, but a parameter may have any text in it, so they can't be told from messages.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Read before any test, which may change the environment.
_FILE = Path(os.environ["FAULTS_FIRST_FAILURE"])


def _write(report: Any, when: str) -> None:
    # The workers of xdist send their reports to the first process, which writes them.
    if "PYTEST_XDIST_WORKER" not in os.environ and not _FILE.exists():
        _FILE.write_text(json.dumps({"test": report.nodeid, "when": when}))


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _write(report, report.when)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report, "collect")
