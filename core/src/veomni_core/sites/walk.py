"""The walk over the modules of a model, in one list: every rule looks at every module."""

from __future__ import annotations

from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """As ``model.named_modules()``, which hands each module on through a generator per level around it."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        named = waiting.pop()
        path, module = named
        if module in seen:
            continue
        seen.add(module)
        found.append(named)
        if children := module._modules:
            around = f"{path}." if path else ""
            waiting += [(around + name, child) for name in reversed(children) if (child := children[name]) is not None]
    return found
