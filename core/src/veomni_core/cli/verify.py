"""``veomni verify PLUGIN``: every kernel of a plugin through its op's contract."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from veomni_core.cli.output import AsJson, print_json
from veomni_core.discovery import discover
from veomni_core.errors import PluginError
from veomni_core.tables import render_table


def verify(
    plugin: Annotated[str, typer.Argument(help="A plugin's name or its distribution's.")],
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; what is here, without it.")] = None,
    json: AsJson = False,
) -> None:
    """Run every kernel that can run here, in every dtype it declares; exit 1 if one falls short."""
    registry = discover()
    record = registry.plugin(plugin)
    if not record.healthy:
        raise PluginError(f"{record} {record.status}: {record.problem}")

    # Before torch is imported: a device's own library may break that, and its plugin knows why.
    hardware = registry.detect_hardware()

    from veomni_core.testing import check_kernel

    device = device or hardware.device_type
    rows: list[dict[str, Any]] = []
    for spec in record.kernels:
        unmet = spec.hardware.unmet(hardware)
        if unmet:
            rows.append({"kernel": str(spec), "dtype": "-", "result": "skipped", "detail": list(unmet)})
            continue
        for dtype in spec.dtypes:
            report = check_kernel(spec, device, dtype, op=registry.op(spec.op_name))
            result = "ok" if report.ok else "FAILED"
            rows.append({"kernel": str(spec), "dtype": dtype, "result": result, "detail": list(report.failures)})
    if json:
        print_json({"plugin": str(record), "device": device, "results": rows})
    else:
        table = [(r["kernel"], r["dtype"], r["result"], "; ".join(r["detail"])) for r in rows]
        print(render_table(("kernel", "dtype", "result", "detail"), table, f"{record} on {device}"))
    if any(row["result"] == "FAILED" for row in rows):
        raise typer.Exit(1)
