"""Runs what continuous integration asks of a commit: the checks, the tests, other versions, and a part of all tests.

The part follows from the commit's hash, so that over a few commits every part runs. Each stage's wall and CPU seconds
are printed as it ends, and all of them once more at the end. The first stage that fails ends the run, with its code.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = 8  # each takes less than 20 minutes on two cores


def part_of(commit: str, parts: int = PARTS) -> str:
    """The part of ``make test-all`` that runs for a commit, as ``3/8``."""
    return f"{int(commit, 16) % parts + 1}/{parts}"


def main() -> int:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    part = part_of(head.stdout.strip())
    stages = ["check"], ["test"], ["test-versions"], ["test-all", f"PART={part}"]
    lines = []
    code = 0
    for stage in stages:
        started, spent = time.monotonic(), cpu_seconds()
        code = subprocess.run(["make", *stage], cwd=ROOT).returncode
        figures = f"{time.monotonic() - started:5.0f} s, {cpu_seconds() - spent:5.0f} CPU seconds"
        lines.append(f"make {' '.join(stage):22} {figures}{f', failed with {code}' if code else ''}")
        print(f"ci: {lines[-1]}", flush=True)
        if code:
            break
    print("\n".join(["ci: all stages", *lines]), flush=True)
    return code


def cpu_seconds() -> float:
    """User and system time of the processes that have ended, with their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
