"""``veomni verify``: runs each kernel of a plugin, or of all plugins, through its op's contract, in a process each."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.errors import PluginError, UnknownNameError, suggest
from veomni_core.planning.certificates import Certificate, keep, write_certificates
from veomni_core.planning.failed_checks import remember
from veomni_core.planning.this_machine import CheckedKernel, ThisMachine
from veomni_core.tables import render_table


def verify(
    plugin: Annotated[
        str | None,
        typer.Argument(
            help="A plugin's name or its distribution's; without it, every plugin with kernels.",
            autocompletion=complete_plugin,
        ),
    ] = None,
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
    certify: Annotated[
        Path | None,
        typer.Option(
            "--certify", help="Also write the certificates of what passed to this file, to ship in a plugin's package."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Run every kernel that can run here, in every dtype it declares; exit 1 if one fails or none ran.

    What passes is certified on this machine.
    """
    registry = discover()
    records = _records(registry, plugin)
    if dtype is not None and dtype not in DTYPES:
        one_of = ", ".join(DTYPES)
        raise UnknownNameError(f"--dtype: {dtype!r} is not a dtype; write one of {one_of}. {suggest(dtype, DTYPES)}")
    if device is not None:
        check_device(registry, device)

    # Before torch is imported: a broken device library may make that fail, and the device's plugin can say why.
    hardware, device = device_here(registry.detect_hardware(), device, "--device")
    wanted = find_op(registry, op).name if op else None
    asked = [
        (record, spec)
        for record in records
        for spec in record.kernels
        if wanted in (None, spec.op_name) and kernel in (None, spec.name, str(spec))
    ]

    def rows_of(asked: tuple[PluginRecord, KernelSpec]) -> list[Row]:
        record, spec = asked
        if unmet := spec.hardware.unmet(hardware):
            return [Row(str(spec), "-", SKIPPED, unmet)]
        dtypes = tuple(name for name in spec.dtypes if dtype in (None, name))
        if not dtypes:
            return [Row(str(spec), dtype or "-", SKIPPED, (f"declares {', '.join(spec.dtypes)} only",))]
        return verify_kernel(record.name, spec, device, dtypes, timeout)

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(rows_of, asked))
    rows = [row for each in found for row in each]
    by_plugin: dict[str, list[Row]] = {}
    for (record, _), each in zip(asked, found, strict=True):
        by_plugin.setdefault(record.name, []).extend(each)
    passed = [each for name, of_it in by_plugin.items() for each in _remember(of_it, registry.plugin(name), hardware)]
    if certify is not None:
        write_certificates(certify, passed)
    nothing = _why_nothing_ran(rows, kernel, op, [str(spec) for record in records for spec in record.kernels])
    name = ", ".join(map(str, records))
    if json:
        results = [row.to_dict() for row in rows]
        print_json({"plugin": name, "device": device, "results": results, "nothing_ran": nothing})
    else:
        show_results(rows, f"{name} on {device}")
    if nothing:
        typer.echo(f"error: nothing was verified: {nothing}", err=True)
    if nothing or any(row.result in (FAILED, CONTRACT) for row in rows):
        raise typer.Exit(1)


def _records(registry: Registry, plugin: str | None) -> list[PluginRecord]:
    """The plugin of this name; without a name, every one that loaded and has kernels."""
    if plugin is None:
        return [record for record in registry.plugins if record.healthy and record.kernels]
    record = registry.plugin(plugin)
    if not record.healthy:
        raise PluginError(f"{record} {record.absence}")
    return [record]


def _remember(rows: Iterable[Row], record: PluginRecord, hardware: Hardware) -> list[Certificate]:
    """Keep the results of one plugin for this machine's plans, and return the certificates of what passed.

    A contract that failed, or a skipped kernel, says nothing.
    """
    machine, specs = ThisMachine(hardware), {str(spec): spec for spec in record.kernels}
    failed: dict[CheckedKernel, str] = {}
    passed: list[Certificate] = []
    for row in rows:
        if row.result in (OK, FAILED):
            checked = machine.checked(specs[row.kernel], record, row.dtype)
            if row.result == FAILED:
                failed[checked] = (row.detail or ("",))[0]
            else:
                passed.append(Certificate.of_today(checked, row.cases))
    remember(failed, [each.checked for each in passed])
    keep(passed, failed)
    return passed


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
