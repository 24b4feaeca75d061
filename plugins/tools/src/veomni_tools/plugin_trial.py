"""Loads plugins in processes of their own first: one may abort the process that imports it, or never return.

The command ``veomni`` does so for plugins that no op's own plugin names. It costs the start of a process, 0.1 s: they
load at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from signal import Signals
from tempfile import TemporaryFile

from veomni_core.discovery.discover import TRIAL_TIMEOUT as TIMEOUT
from veomni_core.discovery.installed_plugins import InstalledPlugin
from veomni_core.errors import ConfigError

_FOUND = "VEOMNI_PLUGINS_TRIED"  # what was found, so that neither this process nor one that it starts waits again
_RETURNED = "returned"


def tried(plugins: Sequence[InstalledPlugin], seconds: str) -> dict[str, str]:
    """By the module of each plugin, how it ends the process that loads it or outlasts ``seconds``; empty if neither.

    What a plugin raises is no matter of this: who loads it next sees that, with its traceback.

    Args:
        plugins: the plugins.
        seconds: the value of ``VEOMNI_PLUGIN_TIMEOUT``; at 0 there is no trial.

    Raises:
        ConfigError: ``seconds`` is no number.
    """
    try:
        timeout = float(seconds)
    except ValueError:
        raise ConfigError(f"{TIMEOUT}={seconds!r} is no number of seconds") from None
    if timeout <= 0:
        return {}
    found: dict[str, str] = json.loads(os.environ.get(_FOUND, "{}"))
    modules = [plugin.module for plugin in plugins if plugin.module not in found]
    if modules:
        # Not all at once: where each imports torch, they would outlast the time for want of processors.
        with ThreadPoolExecutor(min(len(modules), os.cpu_count() or 1)) as pool:
            found |= zip(modules, pool.map(lambda module: _try(module, timeout), modules), strict=True)
        os.environ[_FOUND] = json.dumps(found)
    return {plugin.module: found[plugin.module] for plugin in plugins}


def _try(module: str, timeout: float) -> str:
    command = [sys.executable, "-m", __name__, module]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Files, since a pipe stays open while what a plugin starts runs.
    with TemporaryFile("w+") as out, TemporaryFile("w+", errors="replace") as errors:
        try:
            done = subprocess.run(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return f"it did not load within {timeout:g} s ({TIMEOUT})"
        for each in (out, errors):
            each.seek(0)
        if out.read().endswith(_RETURNED):
            return ""
        how = Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
        return f"it ended the process that loaded it: {': '.join([how, *errors.read().strip().splitlines()[:1]])}"


def _load_here(module: str) -> None:
    import importlib

    from veomni_core.discovery.hooks import described_by

    answers = os.dup(1)
    os.dup2(2, 1)  # what the plugin prints is no answer
    with contextlib.suppress(BaseException):
        described_by(importlib.import_module(module))
    os.write(answers, _RETURNED.encode())
    os._exit(0)  # no thread of the plugin's keeps this process


if __name__ == "__main__":
    _load_here(sys.argv[1])
