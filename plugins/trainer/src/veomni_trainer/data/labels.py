"""Labels of rows: whether a completion is wanted, or which class a text is of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from veomni_core.commands import shown
from veomni_trainer.data.reading import BadLine

_VERDICTS = {"true": True, "false": False, "1": True, "0": False}  # as CSV holds them


def read_verdict(value: Any, name: str) -> bool:
    """Whether the row's completion is wanted.

    Raises:
        BadLine: the value is neither true nor false.
    """
    verdict = _VERDICTS.get(str(value).lower()) if isinstance(value, (bool, int, str)) else None
    if verdict is None:
        raise BadLine(f"column {name!r} must be true or false, got {shown(value)}")
    return verdict


def read_class(value: Any, name: str) -> str:
    """The row's label as text.

    Raises:
        BadLine: it is neither text, nor an integer, nor true or false.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, str) and value.strip()):
        return str(value)
    raise BadLine(f"column {name!r} must be a label (text or an integer), got {shown(value)}")


def in_order(labels: Iterable[str]) -> list[str]:
    """Distinct labels: integers by their size, others by the alphabet.

    Example:
        >>> in_order(["10", "9", "9"]), in_order(["no", "maybe"])
        (['9', '10'], ['maybe', 'no'])
    """
    found = set(labels)
    numbers = all(each.lstrip("-").isdecimal() for each in found)
    return sorted(found, key=int) if numbers else sorted(found)
