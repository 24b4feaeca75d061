"""The workers of ``veomni verify`` and of other verbs, forked from a process that has imported what they import.

That takes five seconds of processor time, and many tests start a worker. What a worker then does is its own code, in a
process and a session of its own. How ``veomni verify`` starts one is asked where these are not used.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NoReturn

from forked_processes import FORKSERVER, run_and_end, run_veomni
from veomni_conformance.cli import verify_processes, verify_worker
from veomni_tools.cli import doctor_processes

_ONE_AT_A_TIME = threading.Lock()  # no fork holds the pipes of another one


def run_veomni_in_forks(*arguments: str) -> None:
    """The ``veomni`` command, in this process, which was forked, and so are the workers and probes that it asks."""
    verify_processes._Worker = ForkedWorker  # type: ignore[misc]
    doctor_processes._ask = _ask_a_fork
    run_veomni(*arguments)


def _ask_a_fork(
    module: str, *arguments: str, environment: Mapping[str, str], timeout: float
) -> tuple[dict[str, Any], str]:
    """What a probe of ``veomni doctor`` answers in a fork, where it can't tell what else a plugin imports."""

    class Probe:
        @staticmethod
        def main(files: Sequence[str]) -> None:
            os.environ.clear()
            os.environ.update(environment)
            Path(*files).write_text(json.dumps(importlib.import_module(module).probe(*arguments)))

    with tempfile.TemporaryDirectory() as folder:
        answer, errors = Path(folder, "answer"), Path(folder, "errors")
        code = verify_worker.run_forked(Probe, [str(answer)], errors, timeout)
        if code is None:
            return {}, f"did not load within {timeout:g} s"
        if code:
            return {}, f"its process ended with code {code}: {errors.read_text().strip().splitlines()[-1]}"
        return json.loads(answer.read_text()), ""


class ForkedWorker(verify_processes._Worker):
    """A worker that is forked: by a forked process from itself, and by any other from the server of forks.

    One that compiles for GPUs is started.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        if command[-1] == "veomni_conformance.cli.compile_probe":  # it sets what Triton reads when it is imported
            super().__init__(command, environment)
            return
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
        self._process = _Served(command[-1], dict(environment), self._errors.fileno())  # type: ignore[assignment]


class _Served:
    """What :class:`subprocess.Popen` is for a worker."""

    def __init__(self, probe: str, environment: dict[str, str], errors: int) -> None:
        with _ONE_AT_A_TIME:
            (asked, ask), (answers, answered) = os.pipe(), os.pipe()
            arguments = (probe, environment, *map(_Descriptor, (asked, answered, errors)))
            if multiprocessing.parent_process() is None:
                process = FORKSERVER.Process(target=_serve, args=arguments)
                process.start()
                self._pid, self._wait = process.pid, lambda: process.join() or process.exitcode
            else:
                self._pid = os.fork()
                if not self._pid:
                    os.close(ask)
                    os.close(answers)
                    _serve(*arguments)
                self._wait = lambda: os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            os.close(asked)
            os.close(answered)
        self.stdin, self.stdout = open(ask, "w"), open(answers)  # noqa: SIM115
        self.returncode: int | None = None

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)

    def communicate(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.read()
        self.returncode = self._wait()


class _Descriptor:
    """A file's number, which is another one where a process of the server gets it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


def _serve(probe: str, environment: dict[str, str], *descriptors: _Descriptor) -> NoReturn:
    """Be the worker, which is ``asked``, has ``answered`` and writes ``errors`` to these, and end."""

    def work() -> None:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor.number, number)
        for descriptor in descriptors[:2]:
            os.close(descriptor.number)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        sys.modules["torch"].set_num_threads(1)
        verify_worker.serve(probe)

    run_and_end(work)
