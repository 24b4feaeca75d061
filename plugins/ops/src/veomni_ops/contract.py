"""The parts of an op's contract: an eager reference, sample inputs, and tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.descriptions.references import load_attribute
from veomni_core.errors import ContractError, did_you_mean
from veomni_ops.many_values import MANY, spread, table

SampleMaker = Callable[[torch.device, torch.dtype], Iterator["Sample"]]
_seed_shift: ContextVar[int] = ContextVar("seed_shift", default=0)


class Size(IntEnum):
    """How much one call of a sample computes, which decides where the conformance check runs it.

    Example:
        >>> [size.name for size in Size if size <= Size.BEYOND_A_TILE]  # what the check runs on a CPU
        ['SMALL', 'BEYOND_A_TILE']
    """

    SMALL = 0  # runs everywhere
    BEYOND_A_TILE = 1  # runs everywhere but in an interpreter
    LARGE = 2  # runs on accelerators only


@dataclass(frozen=True)
class Sample:
    """One call of an op.

    Args:
        name: the sample's name in reports.
        args: the positional arguments. Gradients are compared for the tensors that require them, here and in
            ``kwargs``.
        kwargs: the keyword arguments.
        needs: the features that the call needs. A kernel whose spec declares all of them in ``features`` must compute
            the call; any other kernel must raise.
        values_only: check only values and gradients on this sample, not the situations of training
            (:func:`veomni_conformance.check_kernel`), which other samples cover.
        sizes: those of a site with this call (:class:`~veomni_core.Site`). A kernel whose ``can_run`` refuses them must
            raise.
        only_with, not_with: a feature that a kernel must declare, or must not, to be checked on this sample at all. To
            another kernel the same call means something else.
        laid_out: what lays out a copy of this sample's tensors before a call, where the layout takes memory that is
            not to be kept: all processes of a check have each sample, and one calls the kernel on it.
        loss_scale: multiplies the incoming gradients, as training in float16 does with the loss, so that gradients
            don't underflow.

    Example:
        >>> x, weight = torch.ones(2, 8, requires_grad=True), torch.ones(8)
        >>> sample = Sample("a frozen weight", (x, weight), {"eps": 1e-6})
        >>> sample.kwargs, sample.needs
        ({'eps': 1e-06}, ())
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    values_only: bool = False
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    only_with: str = ""
    not_with: str = ""
    laid_out: Callable[[Sample], Sample] | None = None
    loss_scale: float = 1.0

    def is_for(self, features: Collection[str]) -> bool:
        """Whether a kernel that declares ``features`` is checked on this sample."""
        return (not self.only_with or self.only_with in features) and self.not_with not in features


@dataclass(frozen=True)
class Alike:
    """Two calls with a part in common, which a kernel that promises batch invariance gives the same bits.

    Args:
        words: what the calls are, for messages: ``where its second sequence is alone``.
        calls: the two; the second may be made of the first one's results, as what goes on from a state.
        parts: what each of their first results has in common with the other's.

    Example:
        >>> x = torch.ones(3, 8)
        >>> alike = Alike("where a row is alone", (Sample("all", (x,)), Sample("one", (x[1:2],))),
        ...               (lambda y: y[1:2], lambda y: y))
        >>> [part(call.args[0]).shape for call, part in zip(alike.calls, alike.parts)]
        [torch.Size([1, 8]), torch.Size([1, 8])]
    """

    words: str
    calls: tuple[Sample, Sample | Callable[[tuple[Tensor, ...]], Sample]]
    parts: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


AlikeMaker = Callable[[Sample, Collection[str]], Iterator[Alike]]


@dataclass(frozen=True)
class Tolerance:
    """How far a result ``y`` may be from the float64 oracle ``o``. Both bounds must hold.

    Args:
        element: the bound for every element, ``|y - o| <= element * (|o| + rms(o))``.
        norm: the bound for the whole tensor, ``norm(y - o) <= norm * norm(o)``. Rounding averages out in it, so it can
            be far tighter.

    Example:
        >>> values = {"float32": Tolerance(element=2e-6, norm=5e-7), "bfloat16": Tolerance(1.6e-2, 4e-3)}
        >>> values["bfloat16"]
        Tolerance(element=0.016, norm=0.004)
    """

    element: float
    norm: float


def tolerances(**by_dtype: tuple[float, float]) -> dict[str, Tolerance]:
    """A tolerance of each dtype, from its bounds for elements and for the norm.

    Example:
        >>> tolerances(float32=(2e-6, 5e-7))
        {'float32': Tolerance(element=2e-06, norm=5e-07)}
    """
    return {dtype: Tolerance(element, norm) for dtype, (element, norm) in by_dtype.items()}


def no_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """The sample maker of a contract that has no samples of some size.

    Args:
        device: where the samples' tensors would be.
        dtype: their dtype.

    Example:
        >>> list(no_samples(torch.device("cpu"), torch.float32))
        []
    """
    return iter(())


def none_alike(sample: Sample, features: Collection[str]) -> Iterator[Alike]:
    """The ``alike`` of a contract whose ``rows`` say everything.

    Args:
        sample: a call.
        features: what the kernel declares.

    Example:
        >>> list(none_alike(Sample("a call", ()), ()))
        []
    """
    return iter(())


@dataclass(frozen=True)
class Contract:
    """What a kernel of one variant of one op must compute, and how closely.

    The sample makers take a device and a dtype and yield the same calls every time (fixed seed).

    An op that chooses, as a top k does, gets inputs without ties in every dtype: which of two equal scores is taken is
    left open. Results that are integers are compared exactly.

    Args:
        op_name: the op.
        variant: the variant.
        reference: the mathematics in plain PyTorch, with the call signature that kernels have. On float64 inputs it is
            the oracle.
        samples: makes small calls.
        values: the tolerance of results, by dtype name (``"bfloat16"``).
        gradients: the tolerance of gradients, by dtype name.
        rounding: by dtype name, the largest share of a result's elements that may differ in any bit from the reference
            in that same dtype. It tells apart variants that differ only in where they round.
        beyond_a_tile: makes calls that are larger than one tile of a kernel (see :class:`Size`).
        large: makes calls of real models' sizes, which are too slow for a CPU.
        primary: picks the tensors to compare out of what a call returns.
        rows: the reference's parameters whose first dimension is the call's rows: any of them, any number of times, in
            any order, are a call too, and each result has their rows in its first dimension. Batch invariance and
            generated samples are checked with them. An input of one row may serve all rows.
        alike: from a sample, and a kernel's features, calls on other layouts of the same positions (padded, packed, cut
            off), to which batch invariance applies too.
        large_factor: what generated samples multiply inputs by where they ask for large values.
        denormal_inputs: whether generated samples ask for inputs below the dtype's smallest normal number.
        dropping: makes calls with a ``dropout``, whose ``value`` is the identity, so that results show which weights
            were dropped. ``check_kernel`` makes them with kernels that declare the feature ``dropout``.
        ranges: the least and the greatest value of a parameter of the reference, where the op's meaning bounds it. No
            generated sample has values outside, and none puts inputs of different ranges into one memory.

    Example:
        >>> def relu_squared(x):
        ...     return x.relu().square()
        >>> def samples(device, dtype):
        ...     draw = Draw(device, dtype)
        ...     yield Sample("odd width", (leaf(draw.normal(3, 97)),))
        ...     yield Sample("no rows", (leaf(draw.normal(0, 97)),))
        >>> bounds = {"float32": Tolerance(element=2e-6, norm=5e-7)}
        >>> contract = Contract("relu_squared", "standard", relu_squared, samples, values=bounds, gradients=bounds)
        >>> [sample.name for sample in contract.samples(torch.device("cpu"), torch.float32)]
        ['odd width', 'no rows']
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
    rows: tuple[str, ...] = ()
    alike: AlikeMaker = none_alike
    large_factor: float = 1e3
    denormal_inputs: bool = True
    dropping: SampleMaker = no_samples
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def contract_for(op: OpSpec, variant: str) -> Contract:
    """The contract of one variant of ``op``.

    Args:
        op: the op's spec.
        variant: one of its variants, or an alias of one.

    Raises:
        ContractError: the op's contract cannot be imported, or does not cover the variant.

    Example:
        >>> from veomni_core import discover
        >>> rms_norm = discover({"VEOMNI_PLUGINS": "veomni-torch"}).op("rms_norm")
        >>> contract_for(rms_norm, "qwen3_5").reference.__name__  # by its alias
        'offset'
        >>> contract_for(rms_norm, "ofset")
        Traceback (most recent call last):
            ...
        veomni_core.errors.ContractError: op rms_norm: veomni_ops.rms_norm:CONTRACTS has no contract for
        'ofset'. Did you mean 'offset'?
    """
    if reference := op.added.get(variant):
        return _added_contract(op, variant, reference)
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
    return contracts[variant]


def _added_contract(op: OpSpec, variant: str, reference: str) -> Contract:
    try:
        contract = load_attribute(reference)
    except Exception as error:
        message = f"{op.name}/{variant}: its contract {reference} failed: {type(error).__name__}: {error}"
        raise ContractError(message) from error
    if not isinstance(contract, Contract):
        raise ContractError(f"{op.name}/{variant}: {reference} is a {type(contract).__name__}, not a Contract")
    if (contract.op_name, contract.variant) != (op.name, variant):
        raise ContractError(
            f"{op.name}/{variant}: {reference} is the contract of {contract.op_name}/{contract.variant}"
        )
    return contract


def as_tensors(result: Any) -> tuple[Tensor, ...]:
    """The result of a call as a tuple of tensors.

    Args:
        result: a tensor, or a tuple or list of tensors.

    Example:
        >>> as_tensors(torch.tensor(1.0)), as_tensors([torch.tensor(1.0), torch.tensor(2.0)])
        ((tensor(1.),), (tensor(1.), tensor(2.)))
    """
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which references compute: float32, or float64 for the oracle's float64 inputs.

    Args:
        tensor: of any floating dtype.

    Example:
        >>> [compute_dtype(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
        [torch.float32, torch.float32, torch.float64]
    """
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in configs and specs: ``bfloat16`` for ``torch.bfloat16``.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


@contextmanager
def other_values(shift: int = 1) -> Iterator[None]:
    """A context in which every :class:`Draw` starts from another seed: samples have the same shapes and other values.

    The conformance check uses them as the next batch, or as the weights after an optimizer step.

    Args:
        shift: which other values; 0 gives the usual ones.

    Example:
        >>> with other_values():
        ...     other = Draw(torch.device("cpu"), torch.float32).normal(3)
        >>> same_shape = Draw(torch.device("cpu"), torch.float32).normal(3)
        >>> other.shape == same_shape.shape, torch.equal(other, same_shape)
        (True, False)
    """
    token = _seed_shift.set(shift)
    try:
        yield
    finally:
        _seed_shift.reset(token)


class Draw:
    """Draws seeded random tensors of one device and dtype, on the CPU, so that every machine gets the same values.

    Args:
        device: where the tensors are.
        dtype: the dtype of :meth:`normal`; :meth:`integers` are int64.
        seed: two draws of one seed give the same tensors in the same order.

    Example:
        >>> draw = Draw(torch.device("cpu"), torch.bfloat16)
        >>> draw.normal(3, 5, scale=0.3, shift=1.0).shape, draw.normal(4).dtype
        (torch.Size([3, 5]), torch.bfloat16)
        >>> draw.integers(8, 2, 3).shape  # six indices of eight experts
        torch.Size([2, 3])
        >>> again = Draw(torch.device("cpu"), torch.bfloat16)
        >>> torch.equal(again.normal(3), Draw(again.device, again.dtype).normal(3))
        True
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed + 7919 * _seed_shift.get())

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normally distributed values. They don't require gradients; see :func:`leaf`.

        Of more than four million, each is one of a million drawn numbers: all of them would take a CPU seconds.
        """
        if math.prod(shape) > MANY:
            return spread((table(self._generator) * scale + shift).to(self.device, self.dtype), shape)
        values = torch.randn(*shape, generator=self._generator, dtype=torch.float64) * scale + shift
        return values.to(self.device, self.dtype)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        """Integers in ``[low, high)``."""
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)


def strided_oddly(tensor: Tensor) -> Tensor:
    """The contiguous ``tensor``, with odd strides of its dimensions of size one, which no element depends on.

    Args:
        tensor: of any shape.

    Example:
        >>> one = strided_oddly(torch.ones(1, 5, 96))
        >>> one.stride(), one.is_contiguous()
        ((7, 96, 1), True)
    """
    strides = (7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided(tensor.shape, tuple(strides))


def leaf(tensor: Tensor) -> Tensor:
    """``tensor`` as a leaf that requires gradients, with the same strides and memory.

    Args:
        tensor: of any shape and floating dtype.

    Example:
        >>> gate, up = torch.ones(4, 6).chunk(2, dim=-1)
        >>> gate = leaf(gate)
        >>> gate.is_leaf, gate.requires_grad, gate.stride()
        (True, True, (6, 1))
    """
    return tensor.detach().requires_grad_()
