"""``veomni doctor``: loads each plugin in a separate process, then checks all together, and says what to install."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Annotated, Any

import typer

from veomni_core.cli.output import AsJson, print_json
from veomni_core.descriptions.hardware import Hardware
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import Registry
from veomni_core.tables import fit, render_table
from veomni_tools.cli.doctor_processes import examine_plugin, examine_torch

_PROCESSES = 4  # so many load at a time, even on fewer cores: a plugin that hangs then delays no other


def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds that one plugin, or torch, may take to load.")] = 60.0,
    json: AsJson = False,
) -> None:
    """Say what each plugin imports, how long it takes, whether it initialises CUDA; exit 1 if one fails or conflicts.

    Each plugin is loaded in a separate process, several at a time, and so is torch. The plugins that load are then
    loaded together, as in a job: plugins may conflict, and a kernel may be for another plugin's op. The versions of
    Python, torch, CUDA or ROCm, the GPU's driver and transformers come first, and what to install to gain what last.
    """
    found = examine(timeout)
    if json:
        print_json(found)
    else:
        show_examination(found)
    failed = any(report["status"] == "failed" or report["devices"] for report in found["plugins"])
    if failed or found["conflicts"] or found["torch_problem"]:
        raise typer.Exit(1)


def examine(timeout: float) -> dict[str, Any]:
    """What ``veomni doctor`` finds, as plain data. ``timeout`` is for each plugin, and for torch."""
    # With autoload off in this process, a plugin that hangs or crashes does so only in its separate process.
    installed = discover({**os.environ, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1", "VEOMNI_PLUGINS": ""})
    plugins = [record for record in installed.plugins if record.name != "veomni-core"]
    with ThreadPoolExecutor(max(_PROCESSES, os.cpu_count() or 1)) as pool:
        asked_of_torch = pool.submit(examine_torch, timeout)  # the slowest, so it starts first
        alone = list(pool.map(lambda record: examine_plugin(record, timeout), plugins))
        of_torch, torch_problem = asked_of_torch.result()
    loaded = ",".join(report["name"] for report in alone if report["status"] == "loaded")
    registry = discover({**os.environ, "VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1", "VEOMNI_PLUGINS": loaded})
    seen_by_torch = Hardware(**of_torch.pop("hardware")) if of_torch else Hardware.cpu()
    hardware = registry.detect_plugin_device() or seen_by_torch
    versions = {"python": platform.python_version(), "torch": version("torch"), "transformers": version("transformers")}
    return {
        "versions": {**versions, "cuda": None, "rocm": None, "driver": None, **of_torch},
        "torch_problem": torch_problem,
        "hardware": hardware.describe(),
        "count": hardware.count,
        "plugins": [_together(report, registry, hardware) for report in alone],
        "conflicts": list(registry.describe_conflicts()),
        "gains": _gains(registry),
    }


def show_examination(found: Mapping[str, Any]) -> None:
    """Print what :func:`examine` found."""
    print(fit(describe_versions(found["versions"])))
    if found["torch_problem"]:
        print(fit(f"torch can't be imported: {found['torch_problem']}"))
    print(fit(f"hardware: {found['hardware']}, count {found['count']}\n"))
    print(_table(found["plugins"]))
    for conflict in found["conflicts"]:
        print(fit(f"conflict: {conflict}"))
    for gain in found["gains"]:
        print(fit(f"pip install {gain['distribution']}: {', '.join(gain['values'])}"))


def describe_versions(versions: Mapping[str, str | None]) -> str:
    """``Python 3.11.9, torch 2.9.0 (CUDA 12.8), transformers 5.2.0, GPU driver 570.86.10``."""
    built_for = [f"{name} {versions[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "rocm")) if versions[key]]
    return ", ".join(
        (
            f"Python {versions['python']}",
            f"torch {versions['torch']} ({', '.join(built_for) or 'built without CUDA or ROCm'})",
            f"transformers {versions['transformers']}",
            f"GPU driver {versions['driver']}" if versions["driver"] else "no GPU driver found",
        )
    )


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


def _gains(registry: Registry) -> list[dict[str, Any]]:
    """Published distributions that are not installed, with the config values that each would add."""
    installed = {record.distribution for record in registry.plugins}
    values: dict[str, list[str]] = {}
    for op in registry.ops.values():
        for value, distribution in op.published.items():
            if distribution and distribution not in installed:
                values.setdefault(distribution, []).append(f"{op.config_field}: {value}")
    return [{"distribution": name, "values": values[name]} for name in sorted(values)]
