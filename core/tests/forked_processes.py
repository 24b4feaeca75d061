"""Processes that are forked from one which has imported torch, transformers and these distributions.

Importing them takes six seconds of processor time, more than a tiny job does; a fork takes none of it. A test that
asks what an installed command imports, or how it starts, starts it by ``subprocess``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn

FORKSERVER = multiprocessing.get_context("forkserver")
# What isn't installed here is passed over. Nothing computes there: a fork of a process with busy threads may hang.
FORKSERVER.set_forkserver_preload(
    [
        *("torch", "transformers", "transformers.trainer", "datasets"),
        *("veomni_transformers.build", "veomni_trainer.run.run_job"),
        *("torch._dynamo", "torch._inductor", "hypothesis", "veomni_conformance.cli.verify_probe"),
    ]
)

_LAST_WORDS = 30.0  # seconds in which the other processes may end by themselves after one has failed


class Forked:
    """A running ``function(*arguments)``, in a session of its own, with its printed text in files.

    Its working directory is ``folder``, or this process's, and ``path`` comes first where it looks for modules.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        environment: Mapping[str, str],
        folder: Path | None = None,
        path: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._arguments = arguments
        where = str(folder or Path.cwd()), [*path]
        self.process = FORKSERVER.Process(
            target=_run, args=(self._folder.name, dict(environment), *where, function, arguments)
        )
        self.process.start()

    def is_running(self) -> bool:
        return self.process.is_alive()

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> CompletedProcess[str]:
        """Kill it and the processes that it has started, if it is still there; gives what it printed and returned."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        texts = [(Path(self._folder.name) / name).read_text(encoding="utf-8") for name in ("out", "err")]
        self._folder.cleanup()
        return CompletedProcess(self._arguments, self.process.exitcode or 0, *texts)


def finish(processes: Sequence[Forked], timeout: float) -> list[CompletedProcess[str]]:
    """Wait until all have ended; the rest is killed after ``timeout`` seconds, or soon after one has failed.

    A process that hangs first prints its threads' stacks.
    """
    until = time.monotonic() + timeout
    while running := [each for each in processes if each.is_running()]:
        if any(each.process.exitcode for each in processes):
            until = min(until, time.monotonic() + _LAST_WORDS)
        if time.monotonic() > until:
            for each in running:
                each.send_signal(signal.SIGABRT)
                each.process.join(5)
            break
        wait([each.process.sentinel for each in running], timeout=1)
    return [each.end() for each in processes]


def fork_veomni(*arguments: str | Path, **environment: str) -> Forked:
    """The ``veomni`` command."""
    return Forked(run_veomni, *map(str, arguments), environment={**os.environ, "OMP_NUM_THREADS": "1", **environment})


def veomni(*arguments: str | Path, timeout: float = 120.0, **environment: str) -> CompletedProcess[str]:
    """Run the ``veomni`` command; gives what it printed and returned."""
    return finish([fork_veomni(*arguments, **environment)], timeout)[0]


def fork_ranks(function: Callable[..., None], *arguments: Any, processes: int) -> list[Forked]:
    """``function(*arguments)`` in each of several processes, which torchrun's variables make one group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
    group |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), f"{processes}")
    return [
        Forked(function, *arguments, environment={**os.environ, **group, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
        for rank in range(processes)
    ]


def veomni_on_ranks(*arguments: str | Path, processes: int, timeout: float = 120.0) -> list[CompletedProcess[str]]:
    """Run the ``veomni`` command on several processes; gives what each rank printed and returned."""
    return finish(fork_ranks(run_veomni, *map(str, arguments), processes=processes), timeout)


def run_veomni(*arguments: str) -> None:
    """The ``veomni`` command, in this process."""
    from veomni_core.cli import main

    sys.argv = ["veomni", *arguments]
    main()


def _run(
    outputs: str,
    environment: dict[str, str],
    folder: str,
    path: list[str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()  # what was imported before the fork stays as long as this process
    os.setsid()  # a process group of its own, so that what it starts ends with it
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(outputs) / name, os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = path
    sys.modules["torch"].set_num_threads(1)
    run_and_end(lambda: function(*arguments))


def run_and_end(function: Callable[[], None]) -> NoReturn:
    """Call ``function``, and end this process with the code that Python would end with after it."""
    ended = 1
    try:
        function()
        ended = 0
    except SystemExit as exit:
        ended = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)  # gloo's threads may outlive the interpreter's teardown, which then aborts
