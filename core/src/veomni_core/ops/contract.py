"""What a contract is made of: an eager reference, sample inputs, and how far a kernel may be from the exact result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from veomni_core.errors import ContractError, did_you_mean
from veomni_core.spec import OpSpec, load_attribute

SampleMaker = Callable[[torch.device, torch.dtype], Iterator["Sample"]]
_seed_shift: ContextVar[int] = ContextVar("seed_shift", default=0)


class Size(IntEnum):
    """How much one call of a sample computes, and so where the conformance check runs it."""

    SMALL = 0  # everywhere
    BEYOND_A_TILE = 1  # wherever kernels run compiled
    LARGE = 2  # on accelerators


@dataclass(frozen=True)
class Sample:
    """One call of an op. Tensors that require gradients are the ones whose gradients are compared.

    ``needs`` names what the call asks for beyond what every kernel of the op computes: a kernel whose spec declares
    all of these ``features`` must compute it, and any other must raise. ``values_only`` keeps the check to the sample's
    values and gradients: it asks nothing of it that another sample was not asked, as what training does with a kernel.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    values_only: bool = False


@dataclass(frozen=True)
class Tolerance:
    """How far a result ``y`` may be from the float64 oracle ``o``; both bounds must hold.

    Every element: ``|y - o| <= element * (|o| + rms(o))``. As a whole: ``norm(y - o) <= norm * norm(o)``, which
    averages rounding out and so can be far tighter.
    """

    element: float
    norm: float


def no_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """For a contract without samples of one size."""
    return iter(())


@dataclass(frozen=True)
class Contract:
    """What a kernel of one variant of one op must compute, and how closely.

    ``reference`` is the eager mathematics in plain PyTorch; on float64 inputs it is the oracle. ``samples`` yields the
    same small calls each time it is asked (fixed seed) for a device and a dtype; ``beyond_a_tile`` does so with calls
    that are larger than the blocks into which kernels cut their inputs, and ``large`` with ones of the sizes that
    models have, too slow for a CPU (see :class:`Size`). ``values`` and ``gradients`` hold a
    :class:`Tolerance` per dtype name. ``rounding`` bounds, per dtype name, the share of elements of the result that
    may differ in any bit from the reference run in that same dtype: it tells apart variants that differ only in where
    they round. ``primary`` picks the tensors to compare out of what a call returns.
    """

    op_name: str
    variant: str
    reference: Callable[..., Any]
    samples: SampleMaker
    values: Mapping[str, Tolerance]
    gradients: Mapping[str, Tolerance]
    rounding: Mapping[str, float] = field(default_factory=dict)
    beyond_a_tile: SampleMaker = no_samples
    large: SampleMaker = no_samples
    primary: Callable[[Any], tuple[Tensor, ...]] = field(default=lambda result: as_tensors(result))


def contract_for(op: OpSpec, variant: str) -> Contract:
    """The contract of one variant of ``op``.

    Raises:
        ContractError: the op's contract cannot be imported, or does not cover the variant.
    """
    try:
        contracts = load_attribute(op.contract)
    except Exception as error:
        message = f"op {op.name}: its contract {op.contract} failed: {type(error).__name__}: {error}"
        raise ContractError(message) from error
    variant = op.canonical_variant(variant)
    if variant not in contracts:
        raise ContractError(
            f"op {op.name}: {op.contract} has no contract for {variant!r}. {did_you_mean(variant, contracts)}"
        )
    return contracts[variant]  # type: ignore[no-any-return]


def as_tensors(result: Any) -> tuple[Tensor, ...]:
    """The tensors of a call's result, in order."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that references compute in: float32, or float64 when they serve as the oracle."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as configs and specs write it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def other_values(shift: int = 1) -> Iterator[None]:
    """Inside, every :class:`Draw` starts from another seed: samples keep their names and shapes, and hold other values.

    The check uses them as the next batch, or as the weights after an optimizer step.
    """
    token = _seed_shift.set(shift)
    try:
        yield
    finally:
        _seed_shift.reset(token)


class Draw:
    """Seeded random tensors of one device and dtype; the same sequence on every machine (drawn on the CPU)."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed + 7919 * _seed_shift.get())

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal values; not a leaf that requires gradients, see :func:`leaf`."""
        values = torch.randn(*shape, generator=self._generator, dtype=torch.float64) * scale + shift
        return values.to(self.device, self.dtype)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        """Integers in ``[low, high)``."""
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)


def leaf(tensor: Tensor) -> Tensor:
    """``tensor``, with its strides as they are, as a leaf whose gradient is wanted."""
    return tensor.detach().requires_grad_()
