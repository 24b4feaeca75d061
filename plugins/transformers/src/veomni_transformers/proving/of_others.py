"""Functions that other code has put into a table of transformers, whose own ones compute what eager code does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def function_of_others(table: Mapping[str, Any], name: str) -> Callable[..., Any] | None:
    """What ``table`` has under ``name``; ``None`` if it has nothing there, or a function of transformers.

    Example:
        >>> from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        >>> function_of_others(ALL_ATTENTION_FUNCTIONS, "sdpa") is None
        True
        >>> function_of_others({"mine": max}, "mine")
        <built-in function max>
    """
    found = table.get(name)
    function = found
    while isinstance(function, partial):
        function = function.func
    home = str(getattr(function, "__module__", ""))
    return None if found is None or home == "transformers" or home.startswith("transformers.") else found
