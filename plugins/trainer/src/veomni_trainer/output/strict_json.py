"""JSON that every parser reads: a number that is not finite is written as ``null``, and read as NaN."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """``value`` as JSON, with ``null`` for NaN and infinities, which JSON has no words for."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def with_nan(record: dict[str, Any]) -> dict[str, Any]:
    """A record of numbers as it was before :func:`to_json`, with NaN for ``null``."""
    return {key: math.nan if value is None else value for key, value in record.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
