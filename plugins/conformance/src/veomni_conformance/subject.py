"""The kernel under check, with its contract's samples, the oracle's results and the kernel's results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from veomni_conformance.comparison import distance, one_line
from veomni_conformance.sample_tensors import copy_of, map_tensors, tensors_of, to_float64, upstream_of
from veomni_conformance.time_spent import COMPARING, KERNEL, REFERENCE, TimeSpent
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.references import load_attribute
from veomni_core.errors import ContractError, did_you_mean
from veomni_core.sites.site import Site
from veomni_ops.contract import Contract, Sample, Size, dtype_name, other_values

_FEW = 16  # integers, which a message shows
Kernel = Callable[..., Any]
Upstream = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    """A call's results, detached, and the gradients of inputs that require one (``None`` if autograd gives none)."""

    results: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Position:
    """Identifies a sample of a contract: its size, and its index among the samples of that size."""

    size: Size
    index: int


class Subject:
    """One kernel with its contract, on one device and in one dtype. All parts of the check work on it.

    A sample is identified by its :class:`Position`. ``other=True`` selects the same sample with other values: the next
    batch, or the same tensors after an optimizer step. While ``draws_parameters`` is set, inputs that want gradients
    are drawn as ``nn.Parameter``, which a kernel may treat in another way than plain tensors.
    """

    def __init__(
        self,
        spec: KernelSpec,
        kernel: Kernel,
        contract: Contract,
        device: torch.device,
        dtype: torch.dtype,
        spent: TimeSpent | None = None,
    ) -> None:
        self.spec, self.kernel, self.contract = spec, kernel, contract
        self.device, self.dtype, self.dtype_name = device, dtype, dtype_name(dtype)
        self.spent = spent or TimeSpent()
        self.parameters = list(inspect.signature(contract.reference).parameters)
        for name in contract.ranges:
            if name not in self.parameters:
                hint = did_you_mean(name, self.parameters)
                raise ContractError(
                    f"{self._contract}: it has a range for {name!r}, no parameter of its reference. {hint}"
                )
        self.draws_parameters = False
        self._drawn: dict[tuple[Size, bool], list[Sample]] = {}
        self._exact: dict[tuple[Position, bool], Outcome] = {}
        self._result_dtypes: dict[Position, list[torch.dtype]] = {}
        self._others: dict[torch.dtype, Subject] = {}

    def in_dtype(self, dtype: torch.dtype) -> Subject:
        """The same kernel with the contract's samples in another dtype."""
        if dtype not in self._others:
            self._others[dtype] = Subject(self.spec, self.kernel, self.contract, self.device, dtype, self.spent)
        return self._others[dtype]

    def has(self, position: Position) -> bool:
        """Whether the contract has a sample at ``position`` in this dtype."""
        return position.index < len(self._samples(position.size, other=False))

    def positions(self, size: Size) -> list[Position]:
        """The positions of all samples of one size."""
        return [Position(size, index) for index in range(len(self._samples(size, other=False)))]

    def sample(self, position: Position) -> Sample:
        """One sample, for inspection only. To run the kernel, use :meth:`draw`: a kernel may write into its inputs."""
        return self._samples(position.size, other=False)[position.index]

    def refused(self, position: Position) -> str:
        """Why planning gives no site like a sample to the kernel, which must raise then; empty where it may."""
        sample, spec = self.sample(position), self.spec
        if undeclared := [feature for feature in sample.needs if feature not in spec.features]:
            return f"does not declare {', '.join(undeclared)}"
        if not sample.sizes or not spec.can_run:
            return ""
        site = Site(spec.op_name, "", sample.name, spec.variant, "a sample", sizes=sample.sizes)
        return str(load_attribute(spec.can_run)(site))

    def is_asked_more(self, position: Position) -> bool:
        """Whether the situations of training are checked on a sample too, besides values and gradients."""
        return position.size is Size.SMALL and not self.sample(position).values_only

    def tells(self, position: Position) -> bool:
        """Whether no result and no gradient of a sample is all zeros, which they are where every label is ignored."""
        exact = self.exact(position)
        return all(bool(x.any()) for x in (*exact.results, *exact.gradients.values()) if x is not None)

    def draw(self, position: Position, other: bool = False) -> Sample:
        """A fresh copy of one sample."""
        drawn = self.sample(position)
        if other:
            drawn = _made_different(drawn, self._samples(position.size, other=True)[position.index])
        drawn = copy_of(drawn)
        drawn = drawn.laid_out(drawn) if drawn.laid_out else drawn
        return map_tensors(drawn, _as_parameter) if self.draws_parameters else drawn

    def _samples(self, size: Size, other: bool) -> list[Sample]:
        if (size, other) not in self._drawn:
            makers = (self.contract.samples, self.contract.beyond_a_tile, self.contract.large)
            try:
                with other_values() if other else nullcontext():
                    drawn = makers[size](self.device, self.dtype)
                    self._drawn[size, other] = [each for each in drawn if each.is_for(self.spec.features)]
            except Exception as error:
                message = f"{self._contract}: its samples fail in {self.dtype_name}: {one_line(error)}"
                raise ContractError(message) from error
        return self._drawn[size, other]

    def forget(self, position: Position) -> None:
        """Free the cached results of the oracle for one sample."""
        for other in (False, True):
            self._exact.pop((position, other), None)

    def inputs(self, sample: Sample) -> dict[str, Tensor]:
        """The tensors of a call, by the reference's parameter names; ``name[0]`` for a tensor in a tuple.

        Raises:
            ContractError: the sample does not fit the reference's signature.
        """
        if len(sample.args) > len(self.parameters):
            raise ContractError(f"{self._contract}: sample {sample.name!r} has more arguments than the reference")
        named = [*zip(self.parameters, sample.args, strict=False), *sample.kwargs.items()]
        return {name: tensor for argument, value in named for name, tensor in tensors_of(value, argument)}

    def differentiable(self, sample: Sample) -> dict[str, Tensor]:
        """The inputs that require gradients, by name."""
        return {name: tensor for name, tensor in self.inputs(sample).items() if tensor.requires_grad}

    def call(self, sample: Sample) -> tuple[Tensor, ...]:
        """Call the kernel on ``sample``.

        Raises:
            RuntimeError: the kernel calls ``sys.exit``, which must not end the check.
        """
        try:
            return self._compute(self.kernel, sample)
        except SystemExit as error:
            raise RuntimeError(f"it calls sys.exit({error.code!r})") from error

    def _compute(self, function: Kernel, sample: Sample) -> tuple[Tensor, ...]:
        with self.spent.on(KERNEL if function is self.kernel else REFERENCE):
            results = self.contract.primary(function(*sample.args, **sample.kwargs))
        strangers = [type(result).__name__ for result in results if not isinstance(result, Tensor)]
        if strangers:
            raise TypeError(f"gives a {strangers[0]} where a tensor is expected")
        return results

    def gradients(
        self,
        results: tuple[Tensor, ...],
        sample: Sample,
        upstream: Upstream = upstream_of,
        only: tuple[str, ...] | None = None,
        **options: Any,
    ) -> dict[str, Tensor | None]:
        """The gradients of ``sample``'s inputs, or of those in ``only``, by ``torch.autograd.grad``.

        Args:
            results: the results of a call on ``sample``.
            sample: the call.
            upstream: gives the incoming gradient of a result.
            only: names of inputs; all that require gradients if it is ``None``.
            options: passed on to ``torch.autograd.grad``.
        """
        wanted = {name: x for name, x in self.differentiable(sample).items() if only is None or name in only}
        reached = [result for result in results if result.requires_grad]
        if not reached or not wanted:
            return dict.fromkeys(wanted)
        upstreams = self.upstreams(reached, sample, upstream)
        with self.spent.on(REFERENCE if self.spent.now == REFERENCE else KERNEL):
            found = torch.autograd.grad(reached, list(wanted.values()), upstreams, allow_unused=True, **options)
        return dict(zip(wanted, found, strict=True))

    @staticmethod
    def upstreams(results: Iterable[Tensor], sample: Sample, upstream: Upstream = upstream_of) -> list[Tensor]:
        """The incoming gradients of ``results``, times ``sample``'s loss scale."""
        sent = map(upstream, results)
        return list(sent) if sample.loss_scale == 1.0 else [each * sample.loss_scale for each in sent]

    def outcome(self, sample: Sample, upstream: Upstream = upstream_of) -> Outcome:
        """The kernel's results on ``sample``, and its gradients if its spec declares ``backward``."""
        results = self.call(sample)
        gradients = self.gradients(results, sample, upstream) if self.spec.backward else {}
        return Outcome(tuple(result.detach() for result in results), gradients)

    def reference(self, sample: Sample, upstream: Upstream = upstream_of) -> Outcome:
        """The reference's results and gradients on ``sample``, in the sample's own dtype.

        Raises:
            ContractError: the reference fails on it.
        """
        with self.spent.on(REFERENCE):
            results = self.reference_results(sample)
            gradients = self.gradients(results, sample, upstream)
        return Outcome(tuple(result.detach() for result in results), gradients)

    def reference_forward(self, sample: Sample) -> Outcome:
        """The reference's results on ``sample``, without gradients.

        Raises:
            ContractError: the reference fails on it.
        """
        with torch.no_grad():
            return Outcome(self.reference_results(sample))

    def reference_results(self, sample: Sample) -> tuple[Tensor, ...]:
        """The reference's results on ``sample``, with their autograd graph.

        Raises:
            ContractError: the reference fails on it.
        """
        try:
            return self._compute(self.contract.reference, sample)
        except Exception as error:
            raise ContractError(
                f"{self._contract}: the reference fails on its own sample {sample.name!r}: {one_line(error)}"
            ) from error

    def result_dtypes(self, position: Position) -> list[torch.dtype]:
        """The dtypes that the reference's results have on one sample, in the sample's own dtype."""
        if position not in self._result_dtypes:
            results = self.reference_results(self.draw(position))
            self._result_dtypes[position] = [result.dtype for result in results]
        return self._result_dtypes[position]

    def exact(self, position: Position, other: bool = False) -> Outcome:
        """The oracle for one sample: the reference on float64 copies of it."""
        if (position, other) not in self._exact:
            self._exact[position, other] = self.reference(self.exact_sample(position, other))
        return self._exact[position, other]

    def exact_sample(self, position: Position, other: bool = False) -> Sample:
        """The oracle's inputs: float64 copies on the CPU, or on the GPU for large samples that run on one."""
        large_on_a_gpu = position.size is Size.LARGE and self.device.type == "cuda"
        return to_float64(self.draw(position, other), self.device if large_on_a_gpu else "cpu")

    def problem(self, found: Outcome, exact: Outcome, tolerances_of: str | None = None) -> str | None:
        """The first way in which ``found`` is wrong, or ``None``.

        ``tolerances_of`` names the dtype whose tolerances apply; the check's dtype without it.
        """
        with self.spent.on(COMPARING):
            return self._problem(found, exact, tolerances_of or self.dtype_name)

    def plain_problem(self, position: Position, other: bool = False) -> str | None:
        """What is wrong with a call on a fresh copy of one sample, as in :meth:`problem`."""
        return self.problem(self.outcome(self.draw(position, other)), self.exact(position, other))

    def _problem(self, found: Outcome, exact: Outcome, name: str) -> str | None:
        if len(found.results) != len(exact.results):
            return f"it gives {len(found.results)} tensors, expected {len(exact.results)}"
        for index, (result, wanted) in enumerate(zip(found.results, exact.results, strict=True)):
            what = result_name(index, len(found.results))
            if problem := distance(result, wanted, self.contract.values[name], what)[1]:
                return problem
        for argument, gradient in found.gradients.items():
            wanted_gradient = exact.gradients[argument]
            if wanted_gradient is None:
                continue
            if gradient is None:
                return f"the gradient of {argument} is missing"
            what = f"the gradient of {argument}"
            if problem := distance(gradient, wanted_gradient, self.contract.gradients[name], what)[1]:
                return problem
        return None

    @property
    def _contract(self) -> str:
        return f"the contract of {self.contract.op_name}/{self.contract.variant}"


def described(subject: Subject, sample: Sample) -> str:
    """The shapes of a call's tensors, and its options and numbers: ``x (3, 97), weight (97,) float32, eps=1e-06``.

    Of a few integers, as the boundaries of packed sequences, the values: ``cu_seqlens [0, 3, 7] int32``.
    """
    parts = []
    for name, x in subject.inputs(sample).items():
        dtype = "" if x.dtype in (subject.dtype, torch.int64) else f" {dtype_name(x.dtype)}"
        few = x.dim() < 2 and x.numel() <= _FEW and not (x.is_floating_point() or x.is_complex())
        parts.append(f"{name} {x.tolist() if few else tuple(x.shape)}{dtype}")
    named = [*zip(subject.parameters, sample.args, strict=False), *sample.kwargs.items()]
    plain = (bool, int, float, str)
    for name, value in named:
        if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(each, plain) for each in value)):
            parts.append(f"{name}={value!r}")
    return ", ".join(parts)


def result_name(index: int, count: int) -> str:
    """The name of a call's result in messages."""
    return "the result" if count == 1 else f"result {index}"


def _as_parameter(tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor.detach()) if tensor.requires_grad else tensor


def _made_different(first: Sample, other: Sample) -> Sample:
    """``other``, if it has the same shapes and other values; else ``first`` with its inputs multiplied by -0.5.

    A contract that does not use ``Draw`` yields the same values twice; one that draws its sizes yields other shapes.
    Only inputs that require gradients are multiplied.
    """
    pairs = list(
        zip(
            tensors_of((first.args, tuple(first.kwargs.values())), ""),
            tensors_of((other.args, tuple(other.kwargs.values())), ""),
            strict=False,
        )
    )
    alike = all(a.shape == b.shape and a.dtype == b.dtype for (_, a), (_, b) in pairs)
    floats = [(a, b) for (_, a), (_, b) in pairs if a.requires_grad and a.numel()]
    if alike and all(not torch.equal(a, b) for a, b in floats):
        return other
    return map_tensors(first, lambda t: (t.detach() * -0.5).requires_grad_() if t.requires_grad and t.is_leaf else t)
