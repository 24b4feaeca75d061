"""``veomni doctor``: loads each plugin in a separate process, then checks all together, and says what to install."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from veomni_core.cli.output import AsJson, print_json
from veomni_core.descriptions.hardware import Hardware
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.tables import fit, render_table


def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds that one plugin may take to load.")] = 60.0,
    json: AsJson = False,
) -> None:
    """Say what each plugin imports, how long it takes, whether it initialises CUDA; exit 1 if one fails or conflicts.

    Each plugin is loaded in a separate process. The plugins that load are then loaded together, as in a job: plugins
    may conflict, and a kernel may be for another plugin's op.
    """
    found = examine(timeout)
    if json:
        print_json(found)
    else:
        show_examination(found)
    if found["conflicts"] or any(report["status"] == "failed" or report["devices"] for report in found["plugins"]):
        raise typer.Exit(1)


def examine(timeout: float) -> dict[str, Any]:
    """What ``veomni doctor`` finds, as plain data."""
    # With autoload off in this process, a plugin that hangs or crashes does so only in its separate process.
    installed = discover({**os.environ, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1", "VEOMNI_PLUGINS": ""})
    alone = [_examine(record, timeout) for record in installed.plugins if record.name != "veomni-core"]
    loaded = ",".join(report["name"] for report in alone if report["status"] == "loaded")
    registry = discover({**os.environ, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1", "VEOMNI_PLUGINS": loaded})
    hardware = registry.detect_hardware()
    reports = [_together(report, registry, hardware) for report in alone]
    return {
        "hardware": hardware.describe(),
        "count": hardware.count,
        "plugins": reports,
        "conflicts": list(registry.describe_conflicts()),
        "gains": _gains(registry),
    }


def show_examination(found: Mapping[str, Any]) -> None:
    """Print what :func:`examine` found."""
    print(fit(f"hardware: {found['hardware']}, count {found['count']}\n"))
    print(_table(found["plugins"]))
    for conflict in found["conflicts"]:
        print(fit(f"conflict: {conflict}"))
    for gain in found["gains"]:
        print(fit(f"pip install {gain['distribution']}: {', '.join(gain['values'])}"))


def _together(report: dict[str, Any], registry: Registry, hardware: Hardware) -> dict[str, Any]:
    """``report`` on a plugin that was loaded alone, updated from the registry of all plugins together."""
    if report["status"] != "loaded":
        return report
    record = registry.plugin(report["name"])
    return {
        **report,
        "status": record.status,
        "problem": record.problem,
        "left_out": [str(skipped) for skipped in record.skipped],
        "kernels": len(record.kernels),
        "usable": sum(not spec.hardware.unmet(hardware) for spec in record.kernels) if record.healthy else 0,
    }


def _table(reports: Iterable[dict[str, Any]]) -> str:
    rows = []
    for report in reports:
        remarks = [report["problem"], *report["devices"], *(f"left out: {kernel}" for kernel in report["left_out"])]
        remarks = [remark for remark in remarks if remark]
        rows.append(
            (
                report["name"],
                report["status"] + (f": {'; '.join(remarks)}" if remarks else ""),
                f"{report['seconds']:.2f}",
                ", ".join(report["imports"]) or "nothing more",
                "yes" if report["initialises_cuda"] else "no",
                f"{report['usable']} of {report['kernels']}",
            )
        )
    columns = ("plugin", "state", "seconds", "imports", "initialises CUDA", "kernels that run here")
    return render_table(columns, rows, "Plugins")


def _examine(record: PluginRecord, timeout: float) -> dict[str, Any]:
    environment = {
        **os.environ,
        "VEOMNI_PLUGINS": record.name,
        "VEOMNI_PLUGINS_BLOCK": "",
        # Stops torch from loading device libraries by itself: a broken one then affects only its own plugin's process.
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
        "devices": [],
        "left_out": [],
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
    """Published distributions that are not installed, with the config values that each would add."""
    installed = {record.distribution for record in registry.plugins}
    values: dict[str, list[str]] = {}
    for op in registry.ops.values():
        for value, distribution in op.published.items():
            if distribution and distribution not in installed:
                values.setdefault(distribution, []).append(f"{op.config_field}: {value}")
    return [{"distribution": name, "values": values[name]} for name in sorted(values)]
