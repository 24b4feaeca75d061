"""Writes a benchmark's result file into ``benchmarks/results``, and prints its table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "benchmarks"
_VERSIONS = (
    "torch",
    "transformers",
    "peft",
    "triton",
    "liger-kernel",
    "fla-core",
    "flash-qla",
    "tilelang",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "quack-kernels",
    "sonic-moe",
)


def machine() -> dict[str, Any]:
    """The processor, the GPU if there is one, and the versions that a figure depends on."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _VERSIONS},
    }
    try:
        import torch

        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name(0)
    except ImportError:
        pass
    return {name: value for name, value in found.items() if value}


def write_results(
    name: str,
    title: str,
    data: dict[str, Any],
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str = "",
    *,
    script: str,
) -> None:
    """Write ``name.json`` with all of ``data`` and the table, and print the table with the note.

    ``script`` is the ``__file__`` of what measured them. Pages of docs/benchmarks take their tables from the file.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = table(columns, rows)
    measured_by = Path(script).resolve().relative_to(ROOT).as_posix()
    found = {"title": title, "script": measured_by, **data, "table": text.splitlines()}
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{title}\n{text}\n{note}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, without a line's end."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
