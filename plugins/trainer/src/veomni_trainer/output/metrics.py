"""``metrics.jsonl``: one line per logged step, appended during training; each step appears at most once."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from veomni_transformers.whole_files import write_whole

Row = dict[str, Any]


def read_metrics(path: Path) -> list[Row]:
    """Every complete line of the file; skips a line that a killed process left incomplete."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(with_nan(json.loads(line)))
        except json.JSONDecodeError:
            continue
    return rows


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop the lines after ``last_step``: a resumed run will write them again."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= last_step]
    write_whole(path, "".join(to_json(row) + "\n" for row in kept))


def append_metrics(path: Path, row: Row) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(to_json(row) + "\n")


def training_rows(rows: list[Row]) -> list[Row]:
    """The rows of training steps, without those of validation."""
    return [row for row in rows if "loss" in row]


def steady(rows: list[Row]) -> list[Row]:
    """The training steps after warm-up, the first tenth (at least two steps); all of them if there are too few."""
    rows = training_rows(rows)
    warm = max(2, len(rows) // 10)
    return rows[warm:] if len(rows) > 2 * warm else rows


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third quartile.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
        (2.0, 4.0)
    """
    first, third = np.quantile(values, (0.25, 0.75)).tolist()
    return first, third


def figures(rows: list[Row]) -> Row:
    """The key figures of a run; time and speed are medians over the :func:`steady` steps, time with its quartiles."""
    train, warm = training_rows(rows), steady(rows)
    if not train:
        return {}
    taught = [row for row in train if row.get("learned_tokens", 1)] or train  # a loss of no token is 0
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    bad = [row for row in rows if "bad" in row]  # steps whose loss or gradient norm was not finite
    used = {
        name: statistics.median(row[name] for row in warm if name in row)
        for name in ("tokens_per_second_each", "tflops", "mfu")
        if any(name in row for row in warm)
    }
    before = [0, *(row["step"] for row in train)]
    seconds = sum(row["step_seconds"] * (row["step"] - last) for row, last in zip(train, before, strict=False))
    learned = [row["learned_tokens"] for row in warm if "learned_tokens" in row]
    return {
        "steps": train[-1]["step"],
        "first_loss": taught[0]["loss"],
        "last_loss": taught[-1]["loss"],
        **({"validation_loss": validation[-1]} if validation else {}),
        **({"bad_steps": len(bad), "first_bad_step": f"step {bad[0]['step']}: {bad[0]['bad']}"} if bad else {}),
        "step_seconds": statistics.median(row["step_seconds"] for row in warm),
        "step_seconds_quartiles": quartiles([row["step_seconds"] for row in warm]),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in warm),
        **({"learned_tokens": statistics.median(learned)} if learned else {}),
        **used,
        "training_seconds": seconds,
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in train),
    }


def to_json(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON, with ``null`` for NaN and infinities, which JSON has no words for."""
    return json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=indent, allow_nan=False)


def with_nan(record: dict[str, Any]) -> dict[str, Any]:
    """A record of numbers as it was before :func:`to_json`, with NaN for ``null``."""
    return {key: math.nan if value is None else value for key, value in record.items()}
