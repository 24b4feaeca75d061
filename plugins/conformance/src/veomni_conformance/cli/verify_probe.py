"""Checks one kernel in this process and writes a line of JSON per dtype. Run by ``veomni verify``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from veomni_conformance import check_kernel
from veomni_conformance.cli.verify_processes import LAUNCH
from veomni_conformance.triton_searches import taking_launch
from veomni_core.discovery.discover import discover
from veomni_core.errors import ContractError


def probe(
    plugin: str, kernel: str, device: str, dtypes: list[str], part: tuple[int, int], settings: dict[str, Any]
) -> Iterator[dict[str, object]]:
    """Check ``kernel`` of ``plugin`` in each dtype, or one part of what is asked, and yield one row each.

    With ``settings``, values of its options, these alone are asked.
    """
    registry = discover()
    (spec,) = [spec for spec in registry.plugin(plugin).kernels if str(spec) == kernel]
    spec = spec.configured("veomni verify", settings)
    for dtype in dtypes:
        start, cases, spent = time.perf_counter(), {}, {}
        try:
            report = check_kernel(spec, device, dtype, op=registry.ops.get(spec.op_name), part=part)
            passes = report.ok or (part[1] > 1 and not report.cases)  # fewer samples than parts
            result, detail = ("ok" if passes else "FAILED"), list(report.failures)
            detail = detail or ([] if passes else ["its contract has no samples"])
            detail += [f"near the limit: {words}" for words in report.near]
            detail += [f"not run: {words}" for words in report.skipped]
            spent = dict(report.seconds)
            cases = {case.sample: (case.worst_value, case.worst_gradient) for case in report.cases}
        except ContractError as error:
            result, detail = "CONTRACT FAILED", [str(error)]
        except Exception as error:
            result, detail = "FAILED", [f"{type(error).__name__}: {error}"]
        seconds = round(time.perf_counter() - start, 2)
        row = {"dtype": dtype, "result": result, "detail": detail, "seconds": seconds, "cases": cases}
        yield {**row, "spent": spent}


def main(arguments: Sequence[str]) -> None:
    """Append the rows to a file: the plugin, the kernel, the device, the dtypes, the part, the file, options."""
    plugin, kernel, device, dtypes, part, file, *options = arguments
    index, count = map(int, part.split("/"))
    settings = json.loads(options[0]) if options else {}
    launch = os.environ.get(LAUNCH)
    with taking_launch(int(launch)) if launch else nullcontext():
        for row in probe(plugin, kernel, device, dtypes.split(","), (index, count), settings):
            with Path(file).open("a") as lines:
                lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
