"""Runs benchmarks of our kernels at a git revision and at the working tree, and fails on a loss of more than 3 %.

    make bench BASE=HEAD~1                      # the kernels whose sources differ
    make bench BASE=main ONLY="kda rms_norm" PAIRS=10

The benchmarks are those of the working tree; each process has the packages of one of the two revisions. Processes take
turns; one measures all that is measured on a GPU, or one benchmark of a CPU. Of each kernel and shape the ratio of head
and base is printed, as the median over pairs of processes with an interval, for the time of forward and backward and
for the peak memory, and for the time of both as a CUDA graph where they can be captured. Exits with 1 if an interval
lies above 1.03 as a whole, with 2 if something could not be measured.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root, for `benchmarks`

from benchmarks.revisions.revision import NoSuchRevision, changed_since, checked_out, commit_of
from benchmarks.revisions.rows import COLUMNS, Row, rows
from benchmarks.revisions.selection import GUARDED, Guarded, NothingOfThatName, asked_for, changed
from benchmarks.revisions.turns import NotMeasured, OneProcess, in_turns
from benchmarks.revisions.verdict import FEWEST_PAIRS, LIMIT
from benchmarks.shared.results import ROOT, table
from veomni_ops.catalog import OPS

_LOSS, _NOT_MEASURED = 1, 2


def main(arguments: Sequence[str] | None = None, repository: Path = ROOT, guarded: Sequence[Guarded] = GUARDED) -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit, a branch or a tag")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="ops or scripts; those that changed, unless given")
    parser.add_argument("--devices", nargs="+", choices=("cpu", "cuda"), help="those that are here, unless given")
    parser.add_argument("--pairs", type=int, default=FEWEST_PAIRS, help="processes of each revision")
    parser.add_argument("--shapes", nargs="+", default=[], metavar="NAME", help="of the benchmark; all, unless given")
    parser.add_argument("--first", action="store_true", help="the first shape of each benchmark alone")
    parser.add_argument("--repeats", type=int, help="turns of a process; the benchmark's own number, unless given")
    options = parser.parse_args(arguments)
    devices = options.devices or _devices()
    try:
        base = commit_of(repository, options.base)
        if options.only:
            chosen = asked_for(options.only, guarded, devices)
        else:
            ops = [op.name for op in OPS]
            chosen = changed(changed_since(repository, base), guarded, devices, ops)
    except (NoSuchRevision, NothingOfThatName) as error:
        parser.error(str(error))
    print(f"base: {options.base} ({base[:12]}); head: the working tree; {options.pairs} pairs of processes", flush=True)
    if not chosen:
        print(f"No kernel that is measured on {' or '.join(devices)} has other sources than at {options.base}.")
        return 0
    found: list[Row] = []
    failures: list[str] = []
    with checked_out(repository, base) as files:
        for path in gone(files, repository):
            print(f"gone: {path} is not in the working tree, and what it measured is not compared", flush=True)
        asked = ["--repeats", str(options.repeats)] if options.repeats else []
        asked += ["--first"] if options.first else ["--shapes", *options.shapes] if options.shapes else []
        of_base = OneProcess("base", files, repository, asked)
        of_head = OneProcess("head", repository, repository, asked)
        for together in in_one_process(chosen):
            for each, runs in in_turns(of_base, of_head, together, options.pairs).items():
                if isinstance(runs, NotMeasured):
                    failures.append(f"{each} was not measured: {runs}")
                else:
                    found.extend(rows(str(each), runs))
    return _report(found, failures)


def in_one_process(chosen: Sequence[Guarded]) -> list[list[Guarded]]:
    """Those of a GPU together, which import torch and transformers once; on a CPU they would share a heap."""
    on_gpus = [each for each in chosen if each.device == "cuda"]
    return [*([each] for each in chosen if each.device != "cuda"), *([on_gpus] if on_gpus else [])]


def gone(base: Path, head: Path) -> list[Path]:
    """The benchmarks that the base has and the head has not, relative to either."""
    having = [path for path in sorted(base.glob("benchmarks/*/*.py")) if "\nBENCHMARK = " in path.read_text()]
    return [path.relative_to(base) for path in having if not (head / path.relative_to(base)).exists()]


def _report(found: Sequence[Row], failures: Sequence[str]) -> int:
    """Print everything, losses and failures last, and return the exit status."""
    if found:
        print(table(COLUMNS, [row.cells() for row in found]))
    for row in found:
        for what, share in row.losses.items():
            print(f"LOSS: {row.benchmark}, {row.kernel}, {row.shape}: {what} {share}, all of it above {LIMIT}")
    for failure in failures:
        print(f"FAILED: {failure}")
    if any(row.losses for row in found):
        return _LOSS
    return _NOT_MEASURED if failures else 0


def _devices() -> tuple[str, ...]:
    import torch  # here, since it takes a second

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def unwind_on_sigterm() -> None:
    """End by SIGTERM as by Ctrl-C: the process that measures is stopped, and the base's files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))


if __name__ == "__main__":
    unwind_on_sigterm()
    sys.exit(main())
