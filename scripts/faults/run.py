"""Plants each fault in a copy of the committed tree, runs the tests there, and writes which one catches it."""

from __future__ import annotations

import argparse
from pathlib import Path

from faults.copied_tree import copied_tree
from faults.listed import Fault, chosen
from faults.results import Results, add, read
from faults.suite_runs import CAUGHT, SuiteRuns


def main(arguments: list[str] | None = None) -> int:
    """0 if every fault that was run is caught."""
    asked = _parsed(arguments)
    wanted = [fault for fault in chosen(asked.only, asked.shard) if not _is_known(fault, asked, read())]
    print(f"{len(wanted)} faults", flush=True)
    missed = 0
    with copied_tree() as tree:
        passing = asked.passing.read_text(encoding="utf-8").splitlines() if asked.passing else ()
        workers = 0 if asked.near_only else asked.workers
        runs = SuiteRuns(tree, asked.suite, workers, asked.near_seconds, passing=passing)
        for number, fault in enumerate(wanted, start=1):
            result = runs.result(fault)
            if not asked.dry:
                add(fault.name, asked.suite, result)
            missed += result["result"] != CAUGHT
            words = result.get("test") or result.get("asked") or result.get("output", "")
            print(f"{number}: {fault.name}: {result['result']} in {result['seconds']} s: {words}", flush=True)
    return int(missed > 0)


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--suite", choices=("test", "all"), default="test", help="what runs: that of which make target")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults alone")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="K/N", help="every N-th fault, from K on")
    parser.add_argument("--missing", action="store_true", help="leave out the faults that have a result")
    parser.add_argument("--workers", type=int, default=2, help="processes for the whole suite")
    parser.add_argument("--near-only", action="store_true", help="run the near files alone, and never the whole suite")
    parser.add_argument("--near-seconds", type=float, default=900.0, help="a run of near files is killed after these")
    parser.add_argument("--passing", type=Path, help="a file of tests that pass without a fault, each in a line")
    parser.add_argument("--dry", action="store_true", help="print the results, and don't write them down")
    return parser.parse_args(arguments)


def _is_known(fault: Fault, asked: argparse.Namespace, results: Results) -> bool:
    """Whether the fault need not be run: there is a result, or the smaller suite catches it already."""
    found = results.get(fault.name, {})
    if asked.suite == "all" and not asked.only and found.get("test", {}).get("result") == CAUGHT:
        return True
    return bool(asked.missing and asked.suite in found)


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    shard = int(index), int(count)
    if not 1 <= shard[0] <= shard[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; write 1/2 and 2/2")
    return shard
