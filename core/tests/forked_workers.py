"""The ``veomni`` command in a fork, whose checks and probes are forks of it in place of new processes.

Importing torch takes five seconds of processor time, and many tests run a verb. What a process then does is its own
code. How ``veomni verify`` starts one is tested where these are not used.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forked_processes import run_and_end, run_veomni
from veomni_conformance.cli import verify_processes
from veomni_tools.cli import doctor_processes

_FORK = multiprocessing.get_context("fork")


def run_veomni_in_forks(*arguments: str) -> None:
    """The ``veomni`` command, in this process, which was forked, and so are its checks and probes."""
    verify_processes.CONTEXT = _FORK  # type: ignore[assignment]
    doctor_processes._ask = _ask_a_fork
    run_veomni(*arguments)


def _ask_a_fork(
    module: str, *arguments: str, environment: Mapping[str, str], timeout: float
) -> tuple[dict[str, Any], str]:
    """What a probe of ``veomni doctor`` answers in a fork, where it can't tell what else a plugin imports."""
    with tempfile.TemporaryDirectory() as folder:
        answer, errors = Path(folder, "answer"), Path(folder, "errors")

        def probe() -> None:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            os.environ.clear()
            os.environ.update(environment)
            answer.write_text(json.dumps(importlib.import_module(module).probe(*arguments)))

        process = _FORK.Process(target=run_and_end, args=(probe,))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            return {}, f"did not load within {timeout:g} s"
        if process.exitcode:
            return {}, f"its process ended with code {process.exitcode}: {errors.read_text().strip().splitlines()[-1]}"
        return json.loads(answer.read_text()), ""
