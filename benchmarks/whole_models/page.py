"""The results on one model's training step: its table, where the GPU's time goes, and the losses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.shared.gpu_kernels import IDLE
from benchmarks.shared.results import table, write_results
from benchmarks.whole_models.arithmetic import mfu
from benchmarks.whole_models.contenders import THEIRS
from benchmarks.whole_models.kernel_kinds import KINDS, OTHER

COLUMNS = (
    "batch",
    "kernels",
    "ms (least to most)",
    "tokens/s",
    "peak GB",
    "speed",
    "memory",
    "largest loss difference",
    "ms (least to most), MFU",
)


def write(name: str, data: dict[str, Any], script: str) -> None:
    """What has been measured so far: ``benchmarks/results/<name>.json``; measured by ``script``."""
    contenders = data["contenders"]
    failed = [f"- {each}: {found['failed']}" for each, found in contenders.items() if "failed" in found]
    parts = [
        *(["\n".join(failed)] if failed else []),
        f"What the GPU does in one step of the first batch, in ms; `{IDLE}` is the time between kernels:",
        table(("kernels", *KINDS, OTHER, IDLE), kernel_rows(contenders)),
    ]
    title = f"Forward and backward of {data['model']}, bf16"
    write_results(name, title, data, COLUMNS, rows(data), "\n\n".join(parts), script=script)


def rows(data: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """One line per batch and contender; no ratios where transformers' own step ended with an error, or was left out.

    A peak is unknown where it was measured after a graph had been captured.
    """
    contenders = data["contenders"]
    baseline = contenders.get(THEIRS, {})
    for batch in dict.fromkeys(batch for found in contenders.values() for batch in found.get("batches", {})):
        theirs = baseline.get("batches", {}).get(batch)
        for name, found in contenders.items():
            if batch not in found.get("batches", {}):
                continue
            this = found["batches"][batch]
            took = f"{this['ms']:.0f} ({this['low ms']:.0f} to {this['high ms']:.0f})"
            share = mfu(data["model"], batch, this["ms"], data["machine"].get("gpu", ""))
            yield (
                batch,
                name,
                took,
                f"{this['tokens/s']:,.0f}",
                "-" if this["peak GB"] is None else f"{this['peak GB']:.1f}",
                f"{theirs['ms'] / this['ms']:.2f}x" if theirs else "-",
                "-" if this["peak GB"] is None or not theirs else f"{this['peak GB'] / theirs['peak GB']:.2f}x",
                f"{largest_difference(found['losses'], baseline['losses']):.2g}"
                if "losses" in found and "losses" in baseline
                else "-",
                took if share is None else f"{took}, {share:.0%}",
            )


def kernel_rows(contenders: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Where a step goes, one line per contender."""
    for name, found in contenders.items():
        if "kernels ms" in found:
            yield name, *(f"{time:.1f}" for time in found["kernels ms"].values())


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def plot(contenders: dict[str, Any], path: Path) -> None:
    """The losses of every contender over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, found in contenders.items():
        if "losses" in found:
            axes.plot(found["losses"], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
