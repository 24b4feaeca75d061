"""Checks one kernel in this process and writes a line of JSON per dtype. Run by ``veomni verify``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from veomni_conformance import check_kernel
from veomni_conformance.cli.verify_processes import LAUNCH
from veomni_conformance.triton_searches import taking_launch
from veomni_core.discovery.discover import discover
from veomni_core.errors import ContractError


def probe(
    plugin: str, kernel: str, device: str, dtypes: list[str], part: tuple[int, int]
) -> Iterator[dict[str, object]]:
    """Check ``kernel`` of ``plugin`` in each dtype, or one part of what is asked, and yield one row each."""
    registry = discover()
    (spec,) = [spec for spec in registry.plugin(plugin).kernels if str(spec) == kernel]
    for dtype in dtypes:
        start, cases, spent = time.perf_counter(), {}, {}
        try:
            report = check_kernel(spec, device, dtype, op=registry.ops.get(spec.op_name), part=part)
            passes = report.ok or (part[1] > 1 and not report.cases)  # fewer samples than parts
            result, detail = ("ok" if passes else "FAILED"), list(report.failures)
            detail = detail or ([] if passes else ["its contract has no samples"])
            detail += [f"not run: {words}" for words in report.skipped]
            spent = dict(report.seconds)
            cases = report.shares
        except ContractError as error:
            result, detail = "CONTRACT FAILED", [str(error)]
        except Exception as error:
            result, detail = "FAILED", [f"{type(error).__name__}: {error}"]
        seconds = round(time.perf_counter() - start, 2)
        row = {"dtype": dtype, "result": result, "detail": detail, "seconds": seconds, "cases": cases}
        yield {**row, "spent": spent}


def main(arguments: Sequence[str]) -> None:
    """Append the rows to a file: the kernel's plugin, the kernel, the device, the dtypes, the part, the file."""
    plugin, kernel, device, dtypes, part, file = arguments
    index, count = map(int, part.split("/"))
    launch = os.environ.get(LAUNCH)
    with taking_launch(int(launch)) if launch else nullcontext():
        for row in probe(plugin, kernel, device, dtypes.split(","), (index, count)):
            with Path(file).open("a") as lines:
                lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
