"""``veomni verify``: runs each kernel of a plugin, or of all plugins, through its op's contract."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from json import JSONDecodeError, loads
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer

from veomni_conformance.cli.names import (
    check_device,
    compiled_gpu,
    complete_device,
    complete_dtype,
    complete_kernel,
    complete_op,
    complete_plugin,
    find_op,
)
from veomni_conformance.cli.verify_processes import (
    CONTRACT,
    EXPECTED,
    FAILED,
    LONGEST_OPS,
    OK,
    SKIPPED,
    Check,
    Checks,
    Row,
    import_once,
    joined,
)
from veomni_conformance.cli.verify_tables import show_functions, show_results, show_slowest
from veomni_conformance.kernel_cases import CheckRequest, KernelCase, cases_in
from veomni_conformance.ledger import Certificate, Ledger, record, write_certificates
from veomni_conformance.requested_device import device_here
from veomni_conformance.this_machine import CheckedKernel, ThisMachine
from veomni_core.cli.output import AsJson, complete_hardware, print_json
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import DTYPES, KernelSpec
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.errors import ConfigError, HostError, PluginError, UnknownNameError, did_you_mean, suggest
from veomni_core.planning.evidence import HERE

_CERTIFIED = "certified here"


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
        list[str] | None,
        typer.Option(help="Only kernels of this op, or config field. Repeatable.", autocompletion=complete_op),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Only this dtype: {', '.join(DTYPES)}.", autocompletion=complete_dtype)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Only kernels that have this option, with this value, as a job sets it. May be given several times.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that one kernel may take in one dtype, or one part of its check.")
    ] = 600.0,
    jobs: Annotated[int, typer.Option(help="How many kernels are checked at a time.", min=1)] = 1,
    certify: Annotated[
        Path | None,
        typer.Option(
            "--certify", help="Also write the certificates of what passed to this file, to ship in a plugin's package."
        ),
    ] = None,
    compile_for: Annotated[
        str | None,
        typer.Option(
            "--compile-for",
            metavar="HARDWARE",
            help="Run nothing: compile Triton's kernels for this GPU (sm90, h200, mi300x, ...). Needs no GPU.",
            autocompletion=complete_hardware,
        ),
    ] = None,
    launch: Annotated[
        int | None,
        typer.Option(
            help="Where Triton functions search among launches, take this one of each list, as 0 for the first and -1 "
            "for the last. Nothing is certified then."
        ),
    ] = None,
    slow: Annotated[
        bool, typer.Option("--slow", help="Also check kernels whose check takes many minutes, each by several jobs.")
    ] = False,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="Only what is not certified here yet, as after a run that was cut off."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Run every kernel that can run here, in every dtype it declares; exit 1 if one fails or none passes.

    What passes is certified on this machine, as soon as it has passed. A kernel that was wrong on such a machine before
    may fail there, and stays refused.
    """
    registry = discover()
    records = _records(registry, plugin)
    if dtype is not None and dtype not in DTYPES:
        one_of = ", ".join(DTYPES)
        raise UnknownNameError(f"--dtype: {dtype!r} is not a dtype; write one of {one_of}. {suggest(dtype, DTYPES)}")
    if compile_for is not None and (device is not None or certify is not None):
        raise ConfigError("--compile-for runs no kernel, so it takes neither --device nor --certify")
    if launch is not None and (compile_for is not None or certify is not None):
        raise ConfigError(
            "--launch takes one launch where training may take others; leave out --certify and --compile-for"
        )
    if missing and (compile_for is not None or launch is not None or certify is not None):
        raise ConfigError(
            "--missing leaves out what is certified here; leave out --compile-for, --launch and --certify"
        )
    if launch is not None and find_spec("triton") is None:
        raise HostError("--launch is for searches of Triton's, which is not installed here; leave it out")
    # Before torch is imported: a broken device library may make that fail, and the device's plugin can say why.
    if compile_for is not None:
        hardware = compiled_gpu(registry, compile_for)
        where, name = compile_for, hardware.describe()
    else:
        if device is not None:
            check_device(registry, device)
        hardware, where = device_here(registry.detect_hardware(), device, "--device")
        name = where
    ops = {find_op(registry, each).name for each in op or ()}
    dtypes = (dtype,) if dtype else ()
    cases = [
        (owner, case)
        for owner in records
        for case in cases_in(CheckRequest(owner.name, dtypes=dtypes), owner, registry, hardware, where)
        if (not ops or case.spec.op_name in ops) and kernel in (None, case.spec.name, str(case.spec))
    ]
    cases = configured(cases, option or ())
    if not (slow or kernel or compile_for):
        cases = [(owner, _unless_slow(case)) for owner, case in cases]
    if missing:
        ledger = Ledger.here(hardware)
        cases = [(owner, _unless_certified(case, owner, ledger)) for owner, case in cases]
    checks = Checks(where, jobs, timeout, launch, compiles=compile_for is not None)
    specs = {str(case.spec): case.spec for _, case in cases}
    owners = {str(case.spec): owner for owner, case in cases}

    def certify_at_once(row: Row) -> None:
        if row.result == OK and compile_for is None and launch is None:
            keep_results([row], owners[row.kernel], hardware, specs)

    rows = _results(cases, checks, jobs if compile_for is None else 1, json, certify_at_once)
    if compile_for is None:
        rows = [as_expected(row, case.spec, hardware) for row, (_, case) in zip(rows, cases, strict=True)]
        passed: list[Certificate] = []
        for owner in records:
            of_it = [row for row, (its, _) in zip(rows, cases, strict=True) if its is owner]
            passed += keep_results(of_it if launch is None else failures(of_it), owner, hardware, specs)
        if certify is not None:
            write_certificates(certify, passed)
    nothing = _why_nothing(rows, kernel, ", ".join(op or ()), dtype, records)
    plugins = ", ".join(map(str, records))
    if json:
        print_json(
            {"plugin": plugins, "device": name, "results": [row.to_dict() for row in rows], "nothing_ran": nothing}
        )
    else:
        show_results(rows, f"{plugins} {'on' if compile_for is None else 'compiled for'} {name}")
        show_slowest(rows)
        show_functions(rows)
    for owner in records:
        for skipped in owner.skipped:
            typer.echo(f"left out of {owner}: {skipped}", err=True)
    if nothing:
        typer.echo(f"error: nothing was verified: {nothing}", err=True)
    if nothing or any(row.result in (FAILED, CONTRACT) for row in rows):
        raise typer.Exit(1)


def configured(
    cases: list[tuple[PluginRecord, KernelCase]], options: Sequence[str]
) -> list[tuple[PluginRecord, KernelCase]]:
    """The cases of kernels that have all these options (``name=value``), set so.

    Raises:
        ConfigError: one is not ``name=value``, no kernel has it, or its value is not allowed.
    """
    values: dict[str, str] = {}
    for option in options:
        name, found, value = option.partition("=")
        if not found:
            raise ConfigError(f"--option {option}: write it as NAME=VALUE")
        known = {each.name for _, case in cases for each in case.spec.options}
        if name not in known:
            has = did_you_mean(name, known) if known else "They have none"
            raise ConfigError(f"--option {option}: none of the kernels to check has an option {name!r}. {has}")
        values[name] = value
    if not values:
        return cases
    having = [each for each in cases if values.keys() <= {option.name for option in each[1].spec.options}]
    if not having:
        raise ConfigError(f"--option: no kernel has all of {', '.join(values)}")
    return [
        (owner, replace(case, spec=case.spec.configured("--option", _typed(case.spec, values))))
        for owner, case in having
    ]


def _typed(spec: KernelSpec, values: Mapping[str, str]) -> dict[str, Any]:
    """The values as JSON has them (``8``, ``true``), but text where an option takes text, or where they are none."""
    typed: dict[str, Any] = dict(values)
    for name in (option.name for option in spec.options if not isinstance(option.default, str)):
        with suppress(JSONDecodeError):
            typed |= {name: loads(values[name])} if name in values else {}
    return typed


def _unless_slow(case: KernelCase) -> KernelCase:
    why = case.spec.slow_check
    return case if case.skip or not why else replace(case, skip=f"slow to check, --slow checks it too: {why}")


def _unless_certified(case: KernelCase, owner: PluginRecord, ledger: Ledger) -> KernelCase:
    certified = not case.skip and ledger.standing(case.spec, owner, (case.dtype,)) == HERE
    return replace(case, skip=_CERTIFIED) if certified else case


def _results(
    cases: Sequence[tuple[PluginRecord, KernelCase]],
    checks: Checks,
    most_parts: int,
    json: bool,
    ended: Callable[[Row], object],
) -> list[Row]:
    """A row for each case. A check in parts, of which there are ``most_parts`` at most, has one row.

    ``ended`` takes the row of each check that is over, one at a time.
    """
    running = [index for index, (_, case) in enumerate(cases) if not case.skip]
    counts = {index: parts_of_check(cases[index][1].spec, most_parts, len(running)) for index in running}
    parts = [(index, (part, of)) for index, of in counts.items() for part in range(of)]
    asked = [Check(cases[index][0].name, cases[index][1].spec, cases[index][1].dtype, part) for index, part in parts]
    import_once()
    show, one_at_a_time = _progress(len(asked), json), Lock()
    over: dict[tuple[str, str], list[Row]] = {}

    def part_ended(check: Check, row: Row) -> None:
        with one_at_a_time:
            show(row)
            rows = over.setdefault((row.kernel, row.dtype), [])
            rows.append(row)
            if len(rows) == check.part[1]:
                ended(joined(rows))

    found: dict[int, list[Row]] = {}
    for (index, _), row in zip(parts, checks.rows(asked, part_ended), strict=True):
        found.setdefault(index, []).append(row)
    return [
        joined(found[index]) if index in found else Row(str(case.spec), case.dtype, SKIPPED, (case.skip,))
        for index, (_, case) in enumerate(cases)
    ]


def parts_of_check(spec: KernelSpec, jobs: int, checks: int) -> int:
    """How many of the jobs share the check of this kernel in one dtype.

    At least as many as there are jobs for each of so many checks. A quarter of them for an op whose check is long: on
    an H200 with 16 jobs the delta rule in one dtype took longer than all other kernels together. All of them for the
    dtypes of a kernel that is slow to check.
    """
    long = jobs // 4 if spec.op_name in LONGEST_OPS else 1
    return max(1, jobs // checks, jobs // len(spec.dtypes) if spec.slow_check else long)


def _progress(total: int, json: bool) -> Callable[[Row], None]:
    """Prints each check that is over on a terminal's standard error; of others each that failed, but beside JSON.

    All kernels of a GPU take minutes, and what is cut off has said what it found.
    """
    ended = count(1)

    def show(row: Row) -> None:
        failed = row.result in (FAILED, CONTRACT)
        why = f"; {'; '.join(row.detail)}" if failed else ""
        place = f"{next(ended)} of {total}: {row.kernel} {row.dtype}"
        if sys.stderr.isatty() or (failed and not json):
            typer.echo(f"{place}: {row.result} in {row.seconds:.0f} s{why}", err=True)

    return show


def _records(registry: Registry, plugin: str | None) -> list[PluginRecord]:
    """The plugin of this name; without a name, every one that loaded and describes kernels."""
    if plugin is None:
        return [record for record in registry.plugins if record.healthy and (record.kernels or record.skipped)]
    record = registry.plugin(plugin)
    if not record.healthy:
        raise PluginError(f"{record} {record.absence}")
    return [record]


def as_expected(row: Row, spec: KernelSpec, hardware: Hardware) -> Row:
    """``row``, with a failure marked as expected where the kernel was seen to fail on such hardware.

    A check that compared nothing, as where a library can't be imported or time runs out, shows no such fault.
    """
    if row.result != FAILED or not row.cases or not (seen := spec.fault_seen(hardware)):
        return row
    return replace(row, result=EXPECTED, detail=(*row.detail, f"stays refused on this machine: {seen}"))


def failures(rows: Iterable[Row]) -> list[Row]:
    """Those of the rows whose kernel was compared and is wrong, with a launch that a search may take."""
    return [row for row in rows if row.result in (FAILED, EXPECTED) and row.cases]


def keep_results(
    rows: Iterable[Row], plugin: PluginRecord, hardware: Hardware, configured: Mapping[str, KernelSpec] | None = None
) -> list[Certificate]:
    """Keep the results of one plugin for this machine's plans, and return the certificates of what passed.

    A contract that failed, or a skipped kernel, is left out. ``configured`` are kernels with options, by name.
    """
    machine, specs = ThisMachine(hardware), {str(spec): spec for spec in plugin.kernels} | dict(configured or {})
    failed: dict[CheckedKernel, str] = {}
    passed: list[Certificate] = []
    for row in rows:
        if row.result in (OK, FAILED, EXPECTED):
            checked = machine.checked(specs[row.kernel], plugin, row.dtype)
            if row.result == OK:
                passed.append(Certificate.of_today(checked, row.cases))
            else:
                failed[checked] = (row.detail or ("",))[0]
    record(passed, failed)
    return passed


def _why_nothing(rows: list[Row], kernel: str | None, ops: str, dtype: str | None, records: list[PluginRecord]) -> str:
    if any(row.result not in (SKIPPED, EXPECTED) for row in rows):
        return ""
    if rows and all(row.result == SKIPPED for row in rows) and any(row.detail == (_CERTIFIED,) for row in rows):
        return ""  # by --missing: the others can't be checked here
    if rows:
        expected = any(row.result == EXPECTED for row in rows)
        return "every kernel was skipped" + expected * ", or failed where it was wrong before"
    given = ("kernel", kernel), ("op", ops), ("dtype", dtype)
    asked = " ".join(f"--{name} {value}" for name, value in given if value)
    known = ", ".join(str(spec) for record in records for spec in record.kernels)
    return f"no kernel matches {asked}; the plugin has {known}" if asked else "the plugin has no kernels"
