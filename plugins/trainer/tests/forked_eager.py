"""``veomni train`` whose eager run is forked from it, in place of a new interpreter that imports everything for 7 s.

How the real one starts is for the tests of ``--compare`` and of ``--json`` in test_command.py, which don't use this.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from forked_processes import Forked, finish, run_veomni
from veomni_trainer.run import eager_process
from veomni_trainer.run.eager import EagerRun


class _Child:
    """Of ``subprocess.Popen`` what the job uses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


def _start(run: EagerRun) -> _Child:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return _Child(pid)
    code = 1
    try:
        os.setpgid(0, 0)
        if run.turns:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        kept = {0, 1, 2, *(run.turns or ())}
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            if descriptor > 2 and os.path.exists(f"/proc/self/fd/{descriptor}"):
                os.close(descriptor)
        code = eager_process.main(json.dumps(asdict(run)))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _run(*arguments: str) -> None:
    started: Any = _start
    EagerRun.start = started
    run_veomni(*arguments)


def fork_veomni_and_eager(*arguments: str | Path) -> Forked:
    """The ``veomni`` command."""
    return Forked(_run, *map(str, arguments), environment={**os.environ, "OMP_NUM_THREADS": "1"})


def veomni_and_eager(*arguments: str | Path, timeout: float = 120.0) -> CompletedProcess[str]:
    """Run the ``veomni`` command; gives what it printed and returned."""
    return finish([fork_veomni_and_eager(*arguments)], timeout)[0]
