"""What the runs found, in ``results.json``: by fault, by suite. Several runs may write it at a time."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

RESULTS = Path(__file__).resolve().parent / "results.json"
_LOCK = Path(tempfile.gettempdir()) / "veomni-faults.lock"
Results = dict[str, dict[str, dict[str, Any]]]


def read(path: Path = RESULTS) -> Results:
    """All results; none if there is no file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def add(name: str, suite: str, result: dict[str, Any], path: Path = RESULTS) -> None:
    """Write one result beside the others. An interrupted run loses nothing that it has found."""
    with FileLock(_LOCK):
        results = read(path)
        results.setdefault(name, {})[suite] = result
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        written.replace(path)
