"""``veomni verify``: runs each kernel of a plugin, or of all plugins, through its op's contract, in a process each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from json import JSONDecodeError, loads
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer

from veomni_conformance.asked_device import device_here
from veomni_conformance.cli.verify_processes import CONTRACT, EXPECTED, FAILED, OK, SKIPPED, Checks, Row, joined
from veomni_core.cli.completion import (
    complete_device,
    complete_dtype,
    complete_hardware,
    complete_kernel,
    complete_op,
    complete_plugin,
)
from veomni_core.cli.names import check_device, compiled_gpu, find_op
from veomni_core.cli.output import AsJson, print_json
from veomni_core.descriptions.hardware import Hardware
from veomni_core.descriptions.kernel_spec import DTYPES, KernelSpec
from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord, Registry
from veomni_core.errors import ConfigError, HostError, PluginError, UnknownNameError, did_you_mean, suggest
from veomni_core.planning.certificates import Certificate, keep, write_certificates
from veomni_core.planning.failed_checks import remember
from veomni_core.planning.this_machine import CheckedKernel, ThisMachine
from veomni_core.tables import render_table

_SLOWEST = 10
# Ops whose contracts take longest: four ranks, recurrences by the token, many samples, many kernels to compile.
LONGEST_OPS = (
    "token_dispatch",
    "chunk_gated_delta_rule",
    "causal_conv1d",
    "kda",
    "mamba2_scan",
    "moe_experts",
    "attention",
    "token_logprobs",
)


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
    timeout: Annotated[
        float, typer.Option(help="Seconds that one kernel may take; with several jobs, in one dtype.")
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
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Only kernels that have this option, with this value, as a job sets it. May be given several times.",
        ),
    ] = None,
    slow: Annotated[
        bool, typer.Option("--slow", help="Also check kernels whose check takes many minutes, each by several jobs.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Run every kernel that can run here, in every dtype it declares; exit 1 if one fails or none passes.

    What passes is certified on this machine. A kernel that was wrong on such a machine before may fail there, and stays
    refused.
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
    if launch is not None and find_spec("triton") is None:
        raise HostError("--launch is for searches of Triton's, which is not installed here; leave it out")
    # Before torch is imported: a broken device library may make that fail, and the device's plugin can say why.
    where = _device(registry, device, launch) if compile_for is None else _target(registry, compile_for)
    wanted = find_op(registry, op).name if op else None
    chosen = [
        (record, spec)
        for record in records
        for spec in record.kernels
        if wanted in (None, spec.op_name) and kernel in (None, spec.name, str(spec))
    ]
    chosen = configured(chosen, option or ())
    wholes = [
        _Asked(record, spec, dtypes)
        for record, spec in chosen
        for dtypes in _checked_together(spec, dtype, 1 if spec.hardware.unmet(where.hardware) else jobs)
    ]

    def is_left_out(spec: KernelSpec) -> bool:
        return bool(spec.slow_check) and not (slow or kernel or where.compiles)

    def runs(spec: KernelSpec) -> bool:
        return not (where.compiles or spec.hardware.unmet(where.hardware) or is_left_out(spec))

    checks_run = sum(runs(each.spec) for each in wholes)
    asked = [part for each in wholes for part in (each.parts(jobs, checks_run) if runs(each.spec) else [each])]
    progress = _Progress(len(asked))

    def rows_of(each: _Asked) -> list[Row]:
        spec, dtypes = each.spec, each.dtypes
        if unmet := spec.hardware.unmet(where.hardware):
            return progress.done([Row(str(spec), "-", SKIPPED, unmet)])
        if not dtypes:
            return progress.done([Row(str(spec), dtype or "-", SKIPPED, (f"declares {', '.join(spec.dtypes)} only",))])
        if is_left_out(spec):
            why = f"slow to check, --slow checks it too: {spec.slow_check}"
            return progress.done([Row(str(spec), name, SKIPPED, (why,)) for name in dtypes])
        return progress.done(checks.rows(each.record.name, spec, where.asked, dtypes, timeout, each.part))

    with where.checks(jobs) as checks, ThreadPoolExecutor(jobs) as pool:
        # The longest first, so that none of them is the last one, alone.
        submitted = {index: pool.submit(rows_of, asked[index]) for index in _longest_first(asked)}
        found = [submitted[index].result() for index in range(len(asked))]
    by_plugin: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for each, its_rows in zip(asked, found, strict=True):
        for row in its_rows:
            by_plugin.setdefault(each.record.name, {}).setdefault((row.kernel, row.dtype), []).append(row)
    specs = {str(each.spec): each.spec for each in asked}
    joined_rows = {name: [joined(parts) for parts in cases.values()] for name, cases in by_plugin.items()}
    if not where.compiles:
        joined_rows = {
            name: [as_expected(row, specs[row.kernel], where.hardware) for row in of_it]
            for name, of_it in joined_rows.items()
        }
    rows = [row for of_it in joined_rows.values() for row in of_it]
    if compile_for is None:
        plugins = [(registry.plugin(name), of_it) for name, of_it in joined_rows.items()]
        kept = ((record, of_it if launch is None else failures(of_it)) for record, of_it in plugins)
        passed = [each for record, of_it in kept for each in keep_results(of_it, record, where.hardware, specs)]
        if certify is not None:
            write_certificates(certify, passed)
    nothing = _why_nothing_ran(rows, kernel, op, [str(spec) for record in records for spec in record.kernels])
    name = ", ".join(map(str, records))
    if json:
        results = [row.to_dict() for row in rows]
        print_json({"plugin": name, "device": where.name, "results": results, "nothing_ran": nothing})
    else:
        show_results(rows, f"{name} {where}")
        show_slowest(rows)
        show_functions(rows)
    if nothing:
        typer.echo(f"error: nothing was verified: {nothing}", err=True)
    if nothing or any(row.result in (FAILED, CONTRACT) for row in rows):
        raise typer.Exit(1)


def configured(
    kernels: list[tuple[PluginRecord, KernelSpec]], options: Sequence[str]
) -> list[tuple[PluginRecord, KernelSpec]]:
    """Those of the kernels that have all these options (``name=value``), set so.

    Raises:
        ConfigError: one is not ``name=value``, no kernel has it, or its value is not allowed.
    """
    values: dict[str, str] = {}
    for option in options:
        name, found, value = option.partition("=")
        if not found:
            raise ConfigError(f"--option {option}: write it as NAME=VALUE")
        known = {each.name for _, spec in kernels for each in spec.options}
        if name not in known:
            has = did_you_mean(name, known) if known else "They have none"
            raise ConfigError(f"--option {option}: no kernel that is asked for has an option {name!r}. {has}")
        values[name] = value
    if not values:
        return kernels
    having = [each for each in kernels if values.keys() <= {option.name for option in each[1].options}]
    if not having:
        raise ConfigError(f"--option: no kernel has all of {', '.join(values)}")
    return [(record, spec.configured("--option", _typed(spec, values))) for record, spec in having]


def _typed(spec: KernelSpec, values: Mapping[str, str]) -> dict[str, Any]:
    """The values as JSON has them (``8``, ``true``), but text where an option takes text, or where they are none."""
    typed: dict[str, Any] = dict(values)
    for name in (option.name for option in spec.options if not isinstance(option.default, str)):
        with suppress(JSONDecodeError):
            typed |= {name: loads(values[name])} if name in values else {}
    return typed


@dataclass(frozen=True)
class _Asked:
    """What one process is asked: a kernel in some dtypes, and one of so many parts of its check."""

    record: PluginRecord
    spec: KernelSpec
    dtypes: tuple[str, ...]
    part: tuple[int, int] = (0, 1)

    def parts(self, jobs: int, checks: int) -> list[_Asked]:
        """This check in parts, where some of the jobs would have nothing to do or would wait for it alone."""
        count = parts_of_check(self.spec, jobs, checks)
        return [replace(self, part=(index, count)) for index in range(count)]


def parts_of_check(spec: KernelSpec, jobs: int, checks: int) -> int:
    """How many of the jobs share the check of this kernel in one dtype.

    At least as many as there are jobs for each of so many checks. A quarter of them for an op whose check is long: on
    an H200 with 16 jobs the delta rule in one dtype took longer than all other kernels together. All of them for the
    dtypes of a kernel that is slow to check.
    """
    long = jobs // 4 if spec.op_name in LONGEST_OPS else 1
    return max(1, jobs // checks, jobs // len(spec.dtypes) if spec.slow_check else long)


def _longest_first(asked: list[_Asked]) -> list[int]:
    ranks = {op: rank for rank, op in enumerate(LONGEST_OPS)}
    return sorted(
        range(len(asked)),
        key=lambda index: (not asked[index].spec.slow_check, ranks.get(asked[index].spec.op_name, 99)),
    )


def _checked_together(spec: KernelSpec, dtype: str | None, jobs: int) -> list[tuple[str, ...]]:
    """The dtypes that one process checks: all of them, but where several kernels are checked at a time, one each.

    The longest check then ends sooner. Alone, a kernel needs its libraries imported only once.
    """
    dtypes = tuple(name for name in spec.dtypes if dtype in (None, name))
    return [(name,) for name in dtypes] if jobs > 1 and dtypes else [dtypes]


class _Progress:
    """Says on standard error, if it is a terminal, which checks are over: all kernels of a GPU take minutes."""

    def __init__(self, total: int) -> None:
        self._total, self._ended, self._lock = total, 0, Lock()

    def done(self, rows: list[Row]) -> list[Row]:
        with self._lock:
            self._ended += 1
            results = ", ".join(f"{row.dtype} {row.result} in {row.seconds:.0f} s" for row in rows)
            if sys.stderr.isatty():
                typer.echo(f"{self._ended} of {self._total}: {rows[0].kernel}: {results}", err=True)
        return rows


@dataclass(frozen=True)
class _Where:
    """Where kernels are checked, or for what they are compiled, and how.

    Attributes:
        hardware: what kernels ask for.
        name: in words.
        checks: starts the processes that check, for so many jobs.
        asked: the device, or the GPU's name, as these processes take it.
        compiles: whether nothing is run.
    """

    hardware: Hardware
    name: str
    checks: Callable[[int], Checks]
    asked: str
    compiles: bool = False

    def __str__(self) -> str:
        return f"compiled for {self.name}" if self.compiles else f"on {self.name}"


def _device(registry: Registry, asked: str | None, launch: int | None) -> _Where:
    if asked is not None:
        check_device(registry, asked)
    hardware, name = device_here(registry.detect_hardware(), asked, "--device")
    return _Where(hardware, name, partial(Checks.running, launch=launch), name)


def _target(registry: Registry, asked: str) -> _Where:
    hardware = compiled_gpu(registry, asked)
    return _Where(hardware, hardware.describe(), Checks.compiling, asked, compiles=True)


def _records(registry: Registry, plugin: str | None) -> list[PluginRecord]:
    """The plugin of this name; without a name, every one that loaded and has kernels."""
    if plugin is None:
        return [record for record in registry.plugins if record.healthy and record.kernels]
    record = registry.plugin(plugin)
    if not record.healthy:
        raise PluginError(f"{record} {record.absence}")
    return [record]


def as_expected(row: Row, spec: KernelSpec, hardware: Hardware) -> Row:
    """The row of a kernel that is wrong where somebody saw it wrong says what was seen; other rows are as they are.

    A check that compared nothing, as where a library can't be imported or time runs out, shows no such fault.
    """
    if row.result != FAILED or not row.cases or not (seen := spec.fault_seen(hardware)):
        return row
    return replace(row, result=EXPECTED, detail=(*row.detail, f"stays refused on this machine: {seen}"))


def failures(rows: Iterable[Row]) -> list[Row]:
    """Those of the rows whose kernel was compared and is wrong, with a launch that a search may take."""
    return [row for row in rows if row.result in (FAILED, EXPECTED) and row.cases]


def keep_results(
    rows: Iterable[Row], record: PluginRecord, hardware: Hardware, specs: Mapping[str, KernelSpec] | None = None
) -> list[Certificate]:
    """Keep the results of one plugin for this machine's plans, and return the certificates of what passed.

    A contract that failed, or a skipped kernel, says nothing. ``specs`` are those of the rows, by name, where not all
    are the record's own: with options they are others.
    """
    machine, specs = ThisMachine(hardware), {str(spec): spec for spec in record.kernels} | dict(specs or {})
    failed: dict[CheckedKernel, str] = {}
    passed: list[Certificate] = []
    for row in rows:
        if row.result in (OK, FAILED, EXPECTED):
            checked = machine.checked(specs[row.kernel], record, row.dtype)
            if row.result == OK:
                passed.append(Certificate.of_today(checked, row.cases))
            else:
                failed[checked] = (row.detail or ("",))[0]
    remember(failed, [each.checked for each in passed])
    keep(passed, failed)
    return passed


def show_results(rows: Iterable[Row], title: str) -> None:
    """Print a line per kernel and dtype."""
    table = [(row.kernel, row.dtype, row.result, "; ".join(row.detail)) for row in rows]
    print(render_table(("kernel", "dtype", "result", "detail"), table, title))


def show_slowest(rows: Iterable[Row]) -> None:
    """Print what the time of the slowest checks was spent on, if there are some that ran."""
    ran = sorted((row for row in rows if row.spent), key=lambda row: -row.seconds)
    if ran:
        parts = list(ran[0].spent)
        table = [
            (row.kernel, row.dtype, f"{row.seconds:.1f}", *(f"{row.spent[part]:.1f}" for part in parts))
            for row in ran[:_SLOWEST]
        ]
        total = sum(row.seconds for row in ran)
        title = f"The slowest of {len(ran)}, in seconds; {total:,.0f} together"
        print(render_table(("kernel", "dtype", "seconds", *parts), table, title))


def show_functions(rows: Iterable[Row]) -> None:
    """Print a line for each Triton function that was compiled ahead, if there are some."""
    most: dict[tuple[str, ...], tuple[int, ...]] = {}
    for row in rows:
        for each in row.functions:
            key = (row.kernel, row.dtype, each["name"], each["constants"], f"{each['warps']}")
            used = (each["registers"], each["shared_bytes"], each["spilled_bytes"])
            most[key] = tuple(map(max, used, most.get(key, used)))
    if most:
        heads = ("kernel", "dtype", "function", "constants", "warps", "registers", "shared bytes", "spilled bytes")
        table = [(*key, *(f"{number:,}" for number in used)) for key, used in most.items()]
        print(render_table(heads, table, "Triton's functions; the most over the alignments of their arguments"))


def _why_nothing_ran(rows: list[Row], kernel: str | None, op: str | None, known: list[str]) -> str:
    if any(row.result not in (SKIPPED, EXPECTED) for row in rows):
        return ""
    if rows:
        expected = any(row.result == EXPECTED for row in rows)
        return "every kernel was skipped" + expected * ", or failed where it was wrong before"
    asked = " ".join(f"--{name} {value}" for name, value in (("kernel", kernel), ("op", op)) if value)
    return f"no kernel matches {asked}; the plugin has {', '.join(known)}" if asked else "the plugin has no kernels"
