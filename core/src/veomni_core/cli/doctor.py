"""``veomni doctor``: each plugin loaded in a process of its own, and what to install to gain what."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from veomni_core.cli.output import AsJson, print_json
from veomni_core.discovery import discover
from veomni_core.registry import PluginRecord, Registry
from veomni_core.tables import render_table


def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds that one plugin may take to load.")] = 60.0,
    json: AsJson = False,
) -> None:
    """Say what each plugin imports, how long it takes, whether it initialises CUDA; exit 1 if one fails."""
    # Autoload is off here, so that a plugin that hangs or crashes does so in its own process only.
    installed = discover({**os.environ, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1", "VEOMNI_PLUGINS": ""})
    reports = [_examine(record, timeout) for record in installed.plugins if record.name != "veomni-core"]
    healthy = [report["name"] for report in reports if report["status"] == "loaded"]
    registry = discover({**os.environ, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1", "VEOMNI_PLUGINS": ",".join(healthy)})
    hardware = registry.detect_hardware()
    gains = _gains(registry)
    if json:
        print_json({"hardware": hardware.describe(), "plugins": reports, "gains": gains})
    else:
        print(f"hardware: {hardware.describe()}, {hardware.count} of it\n")
        print(
            render_table(
                ("plugin", "state", "seconds", "imports", "initialises CUDA", "kernels that run here"),
                [
                    (
                        report["name"],
                        report["status"] + (f": {report['problem']}" if report["problem"] else ""),
                        f"{report['seconds']:.2f}",
                        ", ".join(report["imports"]) or "nothing more",
                        "yes" if report["initialises_cuda"] else "no",
                        f"{report['usable']} of {report['kernels']}",
                    )
                    for report in reports
                ],
                "Plugins",
            )
        )
        for gain in gains:
            print(f"pip install {gain['distribution']}: {', '.join(gain['values'])}")
    if any(report["status"] == "failed" for report in reports):
        raise typer.Exit(1)


def _examine(record: PluginRecord, timeout: float) -> dict[str, Any]:
    environment = {
        **os.environ,
        "VEOMNI_PLUGINS": record.name,
        "VEOMNI_PLUGINS_BLOCK": "",
        # A device library that torch would load by itself, and that is broken, fails in its own plugin's process only.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    environment.pop("VEOMNI_PLUGINS_STRICT", None)
    report = {
        "name": record.name,
        "distribution": str(record),
        "status": "failed",
        "problem": "",
        "seconds": timeout,
        "imports": [],
        "initialises_cuda": False,
        "kernels": 0,
        "usable": 0,
    }
    command = [sys.executable, "-m", "veomni_core.cli.doctor_probe", record.name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {**report, "problem": f"did not load within {timeout:g} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**report, "problem": f"its process ended with code {done.returncode}: {last}"}
    return {**report, **json_module.loads(done.stdout.splitlines()[-1])}


def _gains(registry: Registry) -> list[dict[str, Any]]:
    """Distributions that are published and not installed, with the config values that each would bring."""
    installed = {record.distribution for record in registry.plugins}
    values: dict[str, list[str]] = {}
    for op in registry.ops.values():
        for value, distribution in op.published.items():
            if distribution and distribution not in installed:
                values.setdefault(distribution, []).append(f"{op.config_field}: {value}")
    return [{"distribution": name, "values": values[name]} for name in sorted(values)]
