"""The results on the training steps of a sharded model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.sharded.contenders import baseline
from benchmarks.shared.results import write_results
from benchmarks.whole_models.arithmetic import mfu

GPUS = 2

COLUMNS = (
    "kernels",
    "ms (least to most), MFU",
    "tokens/s of all GPUs",
    "peak GB of a GPU",
    "speed",
    "memory",
    "loss off by",
    "gradient's norm off by",
)


def write(name: str, data: dict[str, Any], script: str) -> None:
    """What has been measured so far: ``benchmarks/results/<name>.json``; measured by ``script``."""
    contenders = data["contenders"]
    title = f"Forward and backward of {data['model']}, sharded over two GPUs, bf16"
    write_results(name, title, data, COLUMNS, rows(data), _bullets(contenders), script=script)


def rows(data: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One line for each contender that ran. The MFU is that of a GPU."""
    model, contenders, (sequences, length) = data["model"], data["contenders"], data["tokens a batch"]
    for name, found in contenders.items():
        if "times ms" not in found:
            continue
        times = found["times ms"]
        median = statistics.median(times)
        share = mfu(model, f"{sequences}x{length}", median, data["machine"].get("gpu", ""))
        batches = found["tokens"] // (sequences * length)  # one that all GPUs share, or one for each
        theirs = contenders.get(baseline(model, name), {})
        known = "times ms" in theirs
        yield (
            name,
            f"{median:.1f} ({min(times):.1f} to {max(times):.1f})"
            + (f", {share * batches / GPUS:.0%}" if share else ""),
            f"{1e3 * found['tokens'] / median:,.0f}",
            f"{found['peak GB']:.1f}",
            f"{statistics.median(theirs['times ms']) / median:.2f}x" if known else "",
            f"{found['peak GB'] / theirs['peak GB']:.2f}x" if known and theirs["peak GB"] else "",
            f"{found['loss off']:.1e}" if "loss off" in found else "",
            f"{found['norm off']:.1e}" if "norm off" in found else "",
        )


def _bullets(contenders: dict[str, Any]) -> str:
    """What ran, and what did not."""
    lines = []
    for name, found in contenders.items():
        lines.extend(f"- {name} {what}: {found[what]}" for what in ("skipped", "failed", "wrong") if what in found)
        if found.get("kernels"):
            lines.append(f"- {name} runs " + "; ".join(f"{op}: {kernel}" for op, kernel in found["kernels"].items()))
    return "\n".join(lines)
