"""Where a router chooses, and how other experts are put there: the router's own code weighs them.

While a :class:`Forced` is entered, one of the calls of ``topk`` in a router gives the given indices, and the values
that the scores have there. All else is the router's own arithmetic, with its own gradients.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_TOP_K = (torch.topk, Tensor.topk)


class Forced(TorchFunctionMode):
    """Within it, call ``number`` of every ``calls`` of ``topk`` takes the experts ``chosen[N, K]``, in rows' order.

    Rows of -1 choose themselves, and so do rows after the last: code that runs on tiles fills them up.
    """

    def __init__(self, chosen: Tensor | None, number: int = 0, calls: int = 1) -> None:
        super().__init__()
        self._chosen, self._number, self._calls = chosen, number, calls
        self.widths: list[tuple[int, int]] = []  # of each call so far: how many it chose, and of how many
        self.taken = 0  # rows

    def __enter__(self) -> Self:
        if any(isinstance(each, Forced) and each._chosen is not None for each in _get_current_function_mode_stack()):
            self._chosen = None  # a replay within this one's context has chosen
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return own
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        now = len(self.widths) % self._calls == self._number
        self.widths.append((own[1].shape[-1], scores.shape[-1]))
        if not now:
            return own
        rows, before = own[1].shape[:-1].numel(), self.taken
        self.taken += rows
        chosen = None if self._chosen is None else self._chosen[before : self.taken]
        if chosen is None or not len(chosen):
            return own
        flat = own[1].reshape(rows, -1)
        filled = torch.cat([chosen, flat[len(chosen) :]])
        indices = torch.where(filled < 0, flat, filled).view(own[1].shape)
        return type(own)((scores.gather(-1, indices), indices))


def indices_in(result: Any) -> list[Tensor]:
    """The tensors of whole numbers in what a router gives."""
    parts = result if isinstance(result, tuple) else (result,)
    return [each for each in parts if isinstance(each, Tensor) and not each.is_floating_point() and each.dim() > 1]
