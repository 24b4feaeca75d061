"""Loads a plugin, or torch, in a separate process, so that one that exits, crashes or hangs is reported as failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from veomni_core.discovery.discover import TRIAL_TIMEOUT
from veomni_core.discovery.registry import PluginRecord

# Stops torch from loading device libraries by itself: a broken one then affects only its own plugin's process.
_NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def examine_plugin(record: PluginRecord, timeout: float) -> dict[str, Any]:
    """What loading the plugin alone does: its ``status``, its ``problem``, what it imports, how long it takes."""
    environment = {**os.environ, **_NO_AUTOLOAD, "VEOMNI_PLUGINS": record.name, "VEOMNI_PLUGINS_BLOCK": ""}
    environment[TRIAL_TIMEOUT] = ""
    environment.pop("VEOMNI_PLUGINS_STRICT", None)
    report = {
        "name": record.name,
        "distribution": str(record),
        "status": "failed",
        "problem": "",
        "seconds": timeout,
        "imports": [],
        "initialises_cuda": False,
        "devices": [],
        "left_out": [],
        "kernels": 0,
        "usable": 0,
    }
    answer, problem = _ask("veomni_tools.cli.doctor_probe", record.name, environment=environment, timeout=timeout)
    return {**report, "problem": problem, **answer}


def examine_torch(timeout: float) -> tuple[dict[str, Any], str]:
    """What torch says of itself and of this machine (see ``doctor_torch_probe``); and why it can't be imported."""
    environment = {**os.environ, **_NO_AUTOLOAD}
    return _ask("veomni_tools.cli.doctor_torch_probe", environment=environment, timeout=timeout)


def _ask(module: str, *arguments: str, environment: Mapping[str, str], timeout: float) -> tuple[dict[str, Any], str]:
    """The JSON that ``module`` prints in a process of its own; or nothing, and how that process ended."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {}, f"did not load within {timeout:g} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {}, f"its process ended with code {done.returncode}: {last}"
    return json.loads(done.stdout.splitlines()[-1]), ""
