"""The contract of an op whose calls are made by several ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_ops.contract import Contract, Sample


@dataclass(frozen=True)
class RankSample:
    """One call that several ranks make together.

    Args:
        name: the sample's name in reports.
        calls: what each rank has, in the order of ranks. Gradients are compared for the tensors that require them.

    Example:
        >>> calls = (Sample("", (torch.ones(2, 4),)), Sample("", (torch.ones(0, 4),)))
        >>> RankSample("a rank without rows", calls).ranks
        2
    """

    name: str
    calls: tuple[Sample, ...]

    @property
    def ranks(self) -> int:
        """How many ranks make the call."""
        return len(self.calls)


@dataclass(frozen=True, kw_only=True)
class RankContract(Contract):
    """A contract whose samples are calls of several ranks. The check starts the ranks as processes of one machine.

    ``reference`` is a kernel too, as slow as it is simple. It is not the oracle: that is ``whole`` in float64.

    Args:
        rank_samples: makes the calls, from a device and a dtype. None may need more than :data:`MOST_RANKS` ranks.
        arguments: the names of the tensors in a rank's ``Sample.args``, for messages.
        call: calls a kernel on what one rank has, with the ranks' process group: ``call(kernel, sample, group)``.
        whole: the whole computation in one process: from what each rank has to what each rank gets.

    Example:
        >>> from torch.distributed.nn.functional import all_reduce
        >>> from veomni_ops.contract import no_samples
        >>> def total(x, group):  # a kernel: the sum over ranks
        ...     return all_reduce(x, group=group)
        >>> def rank_samples(device, dtype):
        ...     yield RankSample("two ranks", (Sample("", (torch.ones(3),)), Sample("", (torch.ones(3),))))
        >>> contract = RankContract(
        ...     "total", "standard", total, no_samples, {}, {}, rank_samples=rank_samples, arguments=("x",),
        ...     call=lambda kernel, sample, group: kernel(*sample.args, group),
        ...     whole=lambda samples: [sum(sample.args[0] for sample in samples)] * len(samples),
        ... )
        >>> [sample] = contract.rank_samples(torch.device("cpu"), torch.float32)
        >>> contract.whole(sample.calls)[1]
        tensor([2., 2., 2.])
    """

    rank_samples: Callable[[torch.device, torch.dtype], Iterator[RankSample]]
    arguments: tuple[str, ...]
    call: Callable[[Callable[..., Any], Sample, Any], Tensor]
    whole: Callable[[Sequence[Sample]], Sequence[Tensor]]


MOST_RANKS = 4
