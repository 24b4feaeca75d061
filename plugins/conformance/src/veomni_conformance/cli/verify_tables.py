"""The tables that ``veomni verify`` prints."""

from __future__ import annotations

from collections.abc import Iterable

from veomni_conformance.cli.verify_processes import Row
from veomni_core.tables import render_table

_SLOWEST = 10


def show_results(rows: Iterable[Row], title: str) -> None:
    """Print a line per kernel and dtype."""
    table = [(row.kernel, row.dtype, row.result, "; ".join(row.detail)) for row in rows]
    print(render_table(("kernel", "dtype", "result", "detail"), table, title))


def show_slowest(rows: Iterable[Row]) -> None:
    """Print how the slowest checks spent their time, if any ran."""
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
