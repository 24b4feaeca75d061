"""``veomni verify PLUGIN``: runs each kernel of a plugin through its op's contract, in a separate process."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from veomni_core.cli.completion import complete_device, complete_dtype, complete_kernel, complete_op, complete_plugin
from veomni_core.cli.names import check_device, find_op
from veomni_core.cli.output import AsJson, print_json
from veomni_core.cli.verify_processes import CONTRACT, FAILED, OK, SKIPPED, Row, verify_kernel
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import DTYPES, KernelSpec
from veomni_core.discovery.asked_device import device_here
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord
from veomni_core.errors import PluginError, UnknownNameError, suggest
from veomni_core.planning.failed_checks import CheckedKernel, remember
from veomni_core.planning.passed_checks import remember_passed
from veomni_core.tables import render_table


def verify(
    plugin: Annotated[
        str, typer.Argument(help="A plugin's name or its distribution's.", autocompletion=complete_plugin)
    ],
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, ...; default: what is found here.", autocompletion=complete_device),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Only kernels of this name, or op/variant:name.", autocompletion=complete_kernel)
    ] = None,
    op: Annotated[
        str | None, typer.Option(help="Only kernels of this op, or of this config field.", autocompletion=complete_op)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Only this dtype: {', '.join(DTYPES)}.", autocompletion=complete_dtype)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one kernel may take.")] = 600.0,
    jobs: Annotated[int, typer.Option(help="How many kernels are checked at a time.", min=1)] = 1,
    json: AsJson = False,
) -> None:
    """Run every kernel that can run here, in every dtype it declares; exit 1 if one fails or none ran."""
    registry = discover()
    record = registry.plugin(plugin)
    if not record.healthy:
        raise PluginError(f"{record} {record.absence}")
    if dtype is not None and dtype not in DTYPES:
        one_of = ", ".join(DTYPES)
        raise UnknownNameError(f"--dtype: {dtype!r} is not a dtype; write one of {one_of}. {suggest(dtype, DTYPES)}")
    if device is not None:
        check_device(registry, device)

    # Before torch is imported: a broken device library may make that fail, and the device's plugin can say why.
    hardware, device = device_here(registry.detect_hardware(), device, "--device")
    wanted = find_op(registry, op).name if op else None
    asked = [
        spec for spec in record.kernels if wanted in (None, spec.op_name) and kernel in (None, spec.name, str(spec))
    ]

    def rows_of(spec: KernelSpec) -> list[Row]:
        if unmet := spec.hardware.unmet(hardware):
            return [Row(str(spec), "-", SKIPPED, unmet)]
        dtypes = tuple(name for name in spec.dtypes if dtype in (None, name))
        if not dtypes:
            return [Row(str(spec), dtype or "-", SKIPPED, (f"declares {', '.join(spec.dtypes)} only",))]
        return verify_kernel(record.name, spec, device, dtypes, timeout)

    with ThreadPoolExecutor(jobs) as pool:
        rows = [row for rows in pool.map(rows_of, asked) for row in rows]
    _remember(rows, record, hardware)
    nothing = _why_nothing_ran(rows, kernel, op, [str(spec) for spec in record.kernels])
    if json:
        results = [row.to_dict() for row in rows]
        print_json({"plugin": str(record), "device": device, "results": results, "nothing_ran": nothing})
    else:
        show_results(rows, f"{record} on {device}")
    if nothing:
        typer.echo(f"error: nothing was verified: {nothing}", err=True)
    if nothing or any(row.result in (FAILED, CONTRACT) for row in rows):
        raise typer.Exit(1)


def _remember(rows: list[Row], record: PluginRecord, hardware: Hardware) -> None:
    """Keep the results for this machine's plans. A contract that failed, or a skipped kernel, says nothing."""
    specs = {str(spec): spec for spec in record.kernels}

    def checked(row: Row) -> CheckedKernel:
        version = record.version_of(specs[row.kernel])
        return CheckedKernel.here(row.kernel, record.distribution, version, row.dtype, hardware)

    failed = {checked(row): (row.detail or ("",))[0] for row in rows if row.result == FAILED}
    passed = {checked(row): specs[row.kernel] for row in rows if row.result == OK}
    remember(failed, passed)
    remember_passed([each for each, spec in passed.items() if spec.digest], failed)


def show_results(rows: Iterable[Row], title: str) -> None:
    """Print a line per kernel and dtype."""
    table = [(row.kernel, row.dtype, row.result, "; ".join(row.detail)) for row in rows]
    print(render_table(("kernel", "dtype", "result", "detail"), table, title))


def _why_nothing_ran(rows: list[Row], kernel: str | None, op: str | None, known: list[str]) -> str:
    if any(row.result != SKIPPED for row in rows):
        return ""
    if rows:
        return "every kernel was skipped"
    asked = " ".join(f"--{name} {value}" for name, value in (("kernel", kernel), ("op", op)) if value)
    return f"no kernel matches {asked}; the plugin has {', '.join(known)}" if asked else "the plugin has no kernels"
