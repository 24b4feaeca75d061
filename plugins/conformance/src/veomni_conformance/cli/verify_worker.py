"""Forks a process for each check, with what every check imports imported already. Started by ``veomni verify``.

torch and its compilers take seconds to import, and a check of its own process needs them each time. A fork has them at
once, and still nothing of another check: no library that a kernel changed, no device that it broke.

Requests are lines of JSON on standard input, answers lines of JSON on standard output: how the check's process ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Nothing that uses a device when it is imported: a fork can't use it then.
_EVERY_CHECK_IMPORTS = ("torch", "torch._dynamo", "torch._inductor", "hypothesis", "veomni_conformance")
_PAUSE = 0.02  # seconds between two looks at a check


def serve(probe: str) -> None:
    """Answer requests until there are no more.

    Args:
        probe: a module whose ``main`` runs one check.
    """
    for name in _EVERY_CHECK_IMPORTS:
        with contextlib.suppress(Exception):  # what can't be imported says so in each check that needs it
            importlib.import_module(name)
    module = importlib.import_module(probe)
    # A check collects garbage several times. Without this each would go through all that was imported, and copy it.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through `finally`, which ends a check that runs
    for line in sys.stdin:
        request = json.loads(line)
        code = run_forked(module, request["arguments"], Path(request["errors"]), request["timeout"])
        print(json.dumps({"code": code}), flush=True)


def run_forked(module: Any, arguments: Sequence[str], errors: Path, timeout: float) -> int | None:
    """Run ``module.main(arguments)`` in a fork.

    Args:
        module: the probe.
        arguments: of ``main``.
        errors: the file of its standard error.
        timeout: seconds that it may take.

    Returns:
        The exit code, negative for a signal; ``None`` if it took too long, or nobody waits for it any more.
    """
    parent, ends = os.getppid(), time.monotonic() + timeout
    child = os.fork()
    if not child:
        _become_the_check(module, arguments, errors)
    with contextlib.suppress(PermissionError):  # it does so itself, and one of both is first
        os.setpgid(child, child)
    code = None
    try:
        while code is None and os.getppid() == parent and time.monotonic() < ends:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(_PAUSE)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # its group, so that compilers that it started end with it
        if code is None:
            os.waitpid(child, 0)
    return code


def _become_the_check(module: Any, arguments: Sequence[str], errors: Path) -> None:
    """Run the check in this process, and end it."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)  # kernels may print, and what they print is no answer
        for place, stream in ((0, nowhere), (1, nowhere), (2, os.open(errors, os.O_WRONLY | os.O_CREAT))):
            os.dup2(stream, place)
        if _device_is_lost():
            os.execv(sys.executable, [sys.executable, "-X", "faulthandler", "-m", module.__name__, *arguments])
        module.main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _device_is_lost() -> bool:
    """Whether an import used the GPU before the fork, so that the fork can't. A new interpreter can."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


if __name__ == "__main__":
    serve(sys.argv[1])
