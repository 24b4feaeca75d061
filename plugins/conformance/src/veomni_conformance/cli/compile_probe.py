"""Compiles one kernel for a GPU in this process, and writes a line of JSON per dtype. Run by ``veomni verify``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from veomni_conformance.triton_ahead import compile_ahead
from veomni_conformance.triton_targets import Target
from veomni_core.discovery.discover import discover
from veomni_core.errors import VeOmniError
from veomni_ops.contract import contract_for


def probe(
    plugin: str, kernel: str, hardware: str, dtypes: list[str], settings: dict[str, Any]
) -> Iterator[dict[str, object]]:
    """Compile ``kernel`` of ``plugin``, with ``settings`` of its options, in each dtype, and yield one row each."""
    registry = discover()
    (spec,) = [spec for spec in registry.plugin(plugin).kernels if str(spec) == kernel]
    spec = spec.configured("veomni verify", settings)
    contract = contract_for(registry.op(spec.op_name), spec.variant)
    for dtype in dtypes:
        start = time.perf_counter()
        row: dict[str, object] = {"dtype": dtype}
        try:
            found = compile_ahead(spec, contract, dtype, Target.of(registry.named_hardware(hardware)))
        except VeOmniError as error:
            row |= {"result": "FAILED", "detail": [f"{type(error).__name__}: {error}"]}
        else:
            not_reached = [f"not reached: {each}" for each in found.not_reached]
            result = "FAILED" if found.failures else "ok" if found.functions else "skipped"
            nothing = [] if found.functions or found.failures else ["it launches no Triton function"]
            row |= {"result": result, "detail": [*found.failures, *nothing, *not_reached]}
            row["functions"] = [asdict(each) for each in found.functions]
        yield {**row, "seconds": round(time.perf_counter() - start, 2)}


def main(arguments: Sequence[str]) -> None:
    """Append the rows to a file: the plugin, the kernel, the hardware, the dtypes, ``0/1``, the file, options."""
    plugin, kernel, hardware, dtypes, _, file, *options = arguments
    for row in probe(plugin, kernel, hardware, dtypes.split(","), json.loads(options[0]) if options else {}):
        with Path(file).open("a") as lines:
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
