"""What every name of a library stands for, to see whether something was replaced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any


def names_of(*libraries: str) -> Iterator[tuple[str, Any]]:
    """Each name of each loaded module of the libraries, and of each class there, with what it stands for."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in libraries:
            continue
        for attribute, value in [*vars(module).items()]:
            yield f"{name}.{attribute}", id(value)
            if inspect.isclass(value) and value.__module__ == name:
                for member, held in vars(value).items():
                    yield f"{name}.{attribute}.{member}", id(held)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
