"""One contender's forward and backward, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from veomni_conformance.bound_models.model_calls import SEED
from veomni_conformance.bound_models.site_comparison import results_of


@dataclass
class Step:
    """A forward on fixed inputs, and the gradients of these and of the parameters.

    Attributes:
        forward: runs it; takes nothing.
        leaves: the tensors whose gradients are computed.
        autocast: the context of a forward.
        in_place: what must hold around :meth:`run`, such as a kernel that is bound; it costs no time that is taken.
        form: what times depend on besides the kernel, for equal calls to be measured once.
        shapes: the shapes of the inputs, for people.
    """

    forward: Callable[[], Any]
    leaves: Sequence[Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]
    in_place: Callable[[], AbstractContextManager[Any]] = nullcontext
    form: Hashable = None
    shapes: str = ""
    _upstream: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Run forward and backward once.

        Raises:
            RuntimeError: nothing of the result has gradients.
        """
        with torch.enable_grad():
            with self.autocast():
                results = [each for _, each in results_of(self.forward()) if each.requires_grad]
            if not results:
                raise RuntimeError("its result has no gradients, so there is no backward to time")
            self._upstream = self._upstream or [_incoming(each) for each in results]
            if self.leaves:
                torch.autograd.grad(results, self.leaves, self._upstream, allow_unused=True)


def _incoming(result: Tensor) -> Tensor:
    """The same gradient for every contender: 1 for a loss, random numbers else."""
    if not result.dim():
        return torch.ones_like(result)
    generator = torch.Generator(result.device).manual_seed(SEED)
    return torch.randn(result.shape, generator=generator, device=result.device, dtype=result.dtype)
