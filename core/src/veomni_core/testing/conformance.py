"""Runs one kernel through its op's contract.

Every sample is compared, in values and in each gradient, with the contract's reference on float64 copies on the CPU.
Besides: no write into an input or an incoming gradient, no result that shares memory with an input, no missing
gradient, second derivatives right or refused, the reference's dtypes and shapes, and, where the kernel promises it, the
same bits on every run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veomni_core.errors import SpecError, did_you_mean
from veomni_core.ops.catalog import BUILTIN_OPS
from veomni_core.ops.contract import Contract, Sample, Tolerance, contract_for
from veomni_core.spec import KernelSpec, OpSpec
from veomni_core.testing.report import CaseResult, ConformanceReport
from veomni_core.testing.sample_tensors import tensors_of, to_float64, upstream_of
from veomni_core.testing.second_derivatives import check_second_derivatives

Kernel = Callable[..., Any]


def check_kernel(
    spec: KernelSpec, device: str | torch.device = "cpu", dtype: str = "float32", *, op: OpSpec | None = None
) -> ConformanceReport:
    """Check ``spec`` on ``device`` in ``dtype``; ``op`` is its op where that is not one of the core's.

    Raises:
        SpecError: the spec doesn't declare ``dtype``, or the op or its contract is unknown.
        KernelLoadError: the kernel can't be imported.
    """
    if dtype not in spec.dtypes:
        raise SpecError(f"{spec} does not declare {dtype}. {did_you_mean(dtype, spec.dtypes)}")
    contract = contract_for(op or _builtin_op(spec.op_name), spec.variant)
    check = _Check(spec, spec.load(), contract, torch.device(device), getattr(torch, dtype))
    return ConformanceReport(str(spec), str(device), dtype, tuple(check.cases()))


def _builtin_op(name: str) -> OpSpec:
    for op in BUILTIN_OPS:
        if op.name == name:
            return op
    raise SpecError(f"op {name!r} is not one of the core's: pass check_kernel(..., op=its OpSpec)")


@dataclass(frozen=True)
class _Run:
    """One call with fresh inputs, and what came of it."""

    inputs: dict[str, Tensor]
    results: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    upstream: tuple[Tensor, ...]


class _Check:
    def __init__(
        self, spec: KernelSpec, kernel: Kernel, contract: Contract, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec, self.kernel, self.contract = spec, kernel, contract
        self.device, self.dtype = device, dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.parameters = list(inspect.signature(contract.reference).parameters)

    def cases(self) -> Iterator[CaseResult]:
        samples = [(sample.name, sample.needs) for sample in self._samples()]
        for position, (name, needs) in enumerate(samples):
            undeclared = [feature for feature in needs if feature not in self.spec.features]
            if undeclared:
                yield self._refusal(position, name, undeclared)
                continue
            try:
                yield self._case(position, name)
            except Exception as error:  # whatever a kernel raises on a legal input is a failure of the kernel
                yield CaseResult(name, (f"raised {type(error).__name__}: {error}",))
        computed = [position for position, (_, needs) in enumerate(samples) if set(needs) <= set(self.spec.features)]
        if self.spec.backward and computed:
            yield check_second_derivatives(self.contract, self.kernel, lambda: self._sample(computed[0]))

    def _samples(self) -> Iterator[Sample]:
        return self.contract.samples(self.device, self.dtype)

    def _sample(self, position: int) -> Sample:
        """A fresh copy of one sample: samples are drawn anew from their seed each time."""
        return next(sample for index, sample in enumerate(self._samples()) if index == position)

    def _case(self, position: int, name: str) -> CaseResult:
        oracle = self._run(self.contract.reference, to_float64(self._sample(position)))
        eager = self._run(self.contract.reference, self._sample(position))
        run = self._run(self.kernel, self._sample(position), backward=self.spec.backward)
        failures = [*self._form(run, eager)]
        if failures:
            return CaseResult(name, tuple(failures))
        failures += self._damage(run, self._sample(position))
        worst_value = worst_gradient = 0.0
        for index, (result, exact, same) in enumerate(zip(run.results, oracle.results, eager.results, strict=True)):
            what = "the result" if len(run.results) == 1 else f"result {index}"
            share, problem = _distance(result, exact, self.contract.values[self.dtype_name], what)
            worst_value = max(worst_value, share)
            failures += problem or self._rounding(result, same, what)
        for argument, gradient in run.gradients.items():
            what = f"the gradient of {argument}"
            if gradient is None:
                failures.append(f"{what} is missing")
                continue
            wanted = oracle.gradients[argument]
            if wanted is not None:
                share, problem = _distance(gradient, wanted, self.contract.gradients[self.dtype_name], what)
                worst_gradient = max(worst_gradient, share)
                failures += problem
        if self.spec.deterministic:
            failures += _differences(run, self._run(self.kernel, self._sample(position), backward=self.spec.backward))
        return CaseResult(name, tuple(failures), worst_value, worst_gradient)

    def _refusal(self, position: int, name: str, undeclared: list[str]) -> CaseResult:
        """What a kernel does not declare, it must refuse: to ignore it would be a silently wrong result."""
        sample = self._sample(position)
        try:
            self.kernel(*sample.args, **sample.kwargs)
        except Exception:
            return CaseResult(f"{name} (refused)", ())
        return CaseResult(
            name, (f"does not declare {', '.join(undeclared)}, but computes something instead of raising",)
        )

    def _run(self, kernel: Kernel, sample: Sample, backward: bool = True) -> _Run:
        inputs = dict(self._named_tensors(sample))
        results = self.contract.primary(kernel(*sample.args, **sample.kwargs))
        differentiable = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        reached = [(result, upstream_of(result)) for result in results if result.requires_grad]
        gradients: dict[str, Tensor | None] = {}
        if backward:
            found: Iterable[Tensor | None] = [None] * len(differentiable)
            if reached:
                found = torch.autograd.grad(
                    [result for result, _ in reached],
                    list(differentiable.values()),
                    [upstream for _, upstream in reached],
                    allow_unused=True,
                )
            gradients = dict(zip(differentiable, found, strict=True))
        return _Run(inputs, tuple(result.detach() for result in results), gradients, tuple(u for _, u in reached))

    def _named_tensors(self, sample: Sample) -> Iterator[tuple[str, Tensor]]:
        for position, value in enumerate(sample.args):
            yield from tensors_of(value, self.parameters[position])
        for name, value in sample.kwargs.items():
            yield from tensors_of(value, name)

    def _form(self, run: _Run, eager: _Run) -> Iterator[str]:
        if len(run.results) != len(eager.results):
            yield f"gives {len(run.results)} tensors, expected {len(eager.results)}"
            return
        for result, expected in zip(run.results, eager.results, strict=True):
            for aspect in ("dtype", "shape", "device"):
                has, wanted = getattr(result, aspect), getattr(expected, aspect)
                if has != wanted:
                    yield f"gives {aspect} {_plain(has)}, expected {_plain(wanted)}"
        for name, gradient in run.gradients.items():
            if gradient is not None and gradient.shape != run.inputs[name].shape:
                shapes = f"{_plain(gradient.shape)}, expected {_plain(run.inputs[name].shape)}"
                yield f"the gradient of {name} has shape {shapes}"

    def _damage(self, run: _Run, fresh: Sample) -> Iterator[str]:
        untouched = dict(self._named_tensors(fresh))
        for name, tensor in run.inputs.items():
            if not _same(tensor.detach(), untouched[name].detach()):
                yield f"wrote into its input {name}"
            for result in run.results:
                if result.numel() and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    yield f"its result shares memory with its input {name}"
        for upstream in run.upstream:
            if not _same(upstream, upstream_of(upstream)):
                yield "wrote into the incoming gradient"

    def _rounding(self, result: Tensor, eager: Tensor, what: str) -> list[str]:
        allowed = self.contract.rounding.get(self.dtype_name)
        if allowed is None or not result.numel():
            return []
        share = float((result != eager).double().mean())
        if share <= allowed:
            return []
        return [
            f"{what} is rounded elsewhere than the reference: {share:.0%} of elements differ, allowed {allowed:.0%}"
        ]


def _distance(found: Tensor, exact: Tensor, allowed: Tolerance, what: str) -> tuple[float, list[str]]:
    """The worst error as a share of what is allowed, and sentences where it is more."""
    if not exact.numel():
        return 0.0, []
    error = (found.detach().cpu().double() - exact.detach()).abs()
    if not torch.isfinite(error).all():
        return float("inf"), [f"{what} is not finite"]
    size = exact.detach().abs()
    rms = float(size.square().mean().sqrt())
    if rms == 0.0:
        largest = float(error.max())
        return (0.0, []) if largest == 0.0 else (float("inf"), [f"{what} is {largest:.1e}, expected exactly zero"])
    element = float((error / (size + rms)).max())
    norm = float(error.norm() / exact.detach().norm())
    problems = [
        f"{what} is off: {measure} error {value:.1e}, allowed {limit:.1e}"
        for measure, value, limit in (("element", element, allowed.element), ("norm", norm, allowed.norm))
        if value > limit
    ]
    return max(element / allowed.element, norm / allowed.norm), problems


def _differences(first: _Run, second: _Run) -> Iterator[str]:
    if not all(_same(a, b) for a, b in zip(first.results, second.results, strict=True)):
        yield "promises determinism, but two runs gave different results"
    for name, gradient in first.gradients.items():
        again = second.gradients[name]
        if gradient is not None and again is not None and not _same(gradient, again):
            yield f"promises determinism, but two runs gave different gradients of {name}"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
