"""Records what comes to a top k, and what it gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class TopK(TorchFunctionMode):
    """Records every top k that is taken: of what, and its indices."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "topk":
            self.seen.append((args[0], found.indices))
        return found
