"""The samples of moe_experts that need the feature ``lora``: calls of other samples, with adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from veomni_ops.contract import Draw, Sample, SampleMaker, leaf

LORA = "lora"
Adapter = tuple[Tensor, Tensor, float]
_GATE_UP, _DOWN = 3, 4  # the places of the projections among the arguments
# By the name of the sample whose call it is: a name, the rank and scaling of the adapters of gate_up_proj and
# down_proj, and whether the situations of training are checked too.
_ADAPTED: dict[str, tuple[str, tuple[int, float] | None, tuple[int, float] | None, bool]] = {
    "odd sizes": ("adapters of odd ranks", (5, 0.5), (3, 2.0), True),
    "empty experts": ("adapters of rank 1, empty experts", (1, 2.0), (1, 0.75), False),
    "one expert takes all": ("adapters of one expert that takes all", (4, 1.0), (4, 1.0), False),
    "an expert twice in a row": ("an adapter of gate and up alone", (4, 0.5), None, True),
    "dropped indices": ("an adapter of down alone, dropped indices", None, (2, 2.0), False),
    "no tokens": ("adapters without tokens", (2, 1.0), (2, 1.0), False),
    "nine choices, some twice, some dropped": ("adapters of rank 128", (128, 0.5), (128, 2.0), False),
    "transposed weights": ("adapters of transposed weights", (33, 0.5), (64, 2.0), False),
}


def with_adapters(maker: SampleMaker) -> SampleMaker:
    """A maker of samples with adapters, from one whose samples have the names and the first arguments of moe_experts'.

    The projections are frozen, as they are where adapters are trained; in a last sample they are trained too. The
    adapters lie in memory as PEFT's do: ``a`` in rows of ``[E * r, in]``, ``b`` in ``[out, r * E]``, rank by rank.

    Args:
        maker: makes the samples without adapters.

    Example:
        >>> from veomni_ops.moe_experts import CONTRACTS
        >>> samples = with_adapters(CONTRACTS["standard"].samples)(torch.device("cpu"), torch.float32)
        >>> first = next(samples)
        >>> first.name, first.needs, [tensor.shape[1] for tensor in first.kwargs["gate_up_lora"][:2]]
        ('adapters of odd ranks', ('lora',), [5, 48])
    """

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        draw = Draw(device, dtype, seed=11)
        for sample in maker(device, dtype):
            if sample.name not in _ADAPTED:
                continue
            name, gate_up, down, asked_more = _ADAPTED[sample.name]
            frozen = tuple(
                each.detach() if place in (_GATE_UP, _DOWN) else each for place, each in enumerate(sample.args)
            )
            adapters = {
                key: adapter(draw, sample.args[place], *of)
                for key, place, of in (("gate_up_lora", _GATE_UP, gate_up), ("down_lora", _DOWN, down))
                if of is not None
            }
            yield Sample(name, frozen, adapters, needs=(LORA,), values_only=not asked_more)
            if sample.name == "empty experts":
                trained = "adapters of weights that are trained too"
                yield Sample(trained, sample.args, adapters, needs=(LORA,), values_only=True)

    return samples


def adapter(draw: Draw, weight: Tensor, rank: int, scaling: float) -> Adapter:
    """An adapter whose product is about as large as ``weight``.

    Example:
        >>> draw = Draw(torch.device("cpu"), torch.float32)
        >>> [tuple(each.shape) for each in adapter(draw, torch.zeros(5, 6, 4), 3, 0.5)[:2]]
        [(5, 3, 4), (5, 6, 3)]
    """
    experts, rows, columns = weight.shape
    a = draw.normal(experts * rank, columns, scale=columns**-0.5).view(experts, rank, columns)
    b = draw.normal(rows, rank * experts, scale=rank**-0.5).view(rows, rank, experts).permute(2, 0, 1)
    return leaf(a), leaf(b), scaling
