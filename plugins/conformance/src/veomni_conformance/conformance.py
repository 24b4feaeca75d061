"""Runs one kernel through its op's contract, and through the situations in which training calls kernels.

On every sample, values and gradients are checked (``values``). The situations are checked on one sample of each form:
frozen inputs, calls in flight, later steps, modes, autocast and mixed dtypes, uses of gradients, memory layouts,
numbers that are not finite, calls of two threads, batch invariance, and the state of the process. Samples have the same
form if the same arguments are given, with the same dtypes and numbers of dimensions, and the same ones are contiguous
and require gradients: kernels branch on these. Second derivatives are checked once, and, of a kernel that passed every
sample, custom operators, compilation, generated samples, and frozen inputs and layouts of samples beyond a tile.

A kernel whose calls are made by several ranks (:class:`~veomni_ops.rank_contract.RankContract`) runs in as many
processes, see :mod:`veomni_conformance.rank_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter

import torch

from veomni_conformance.batch_invariance import check_batch_invariance
from veomni_conformance.calls_in_flight import check_calls_in_flight, check_many_layers
from veomni_conformance.comparison import one_line
from veomni_conformance.compiled_calls import check_compiled_calls, check_compiled_options
from veomni_conformance.concurrent_calls import check_concurrent_calls
from veomni_conformance.custom_operators import check_custom_operators
from veomni_conformance.dropped_weights import check_dropped_weights
from veomni_conformance.frozen_inputs import check_frozen_inputs
from veomni_conformance.generated_samples import MISSING, check_generated_samples, hypothesis_is_installed
from veomni_conformance.gradients_in_use import check_gradients_in_use
from veomni_conformance.huge_calls import asks_for_huge_calls, check_huge_calls
from veomni_conformance.kernel_options import check_options
from veomni_conformance.later_steps import check_later_steps, check_other_integers
from veomni_conformance.memory_layouts import check_memory_layouts
from veomni_conformance.mixed_dtypes import check_autocast, check_mixed_dtypes, check_other_dtypes
from veomni_conformance.modes import check_modes
from veomni_conformance.non_finite import check_non_finite
from veomni_conformance.process_state import RANDOM_STATES, ProcessState, check_process_state
from veomni_conformance.rank_check import check_on_ranks
from veomni_conformance.report import CaseResult, ConformanceReport
from veomni_conformance.second_derivatives import check_second_derivatives
from veomni_conformance.situations import first_of, reveal
from veomni_conformance.subject import Position, Subject, described
from veomni_conformance.time_spent import TimeSpent, compilers_counted
from veomni_conformance.values import check_values
from veomni_core.descriptions.kernel_spec import KernelSpec
from veomni_core.descriptions.op_spec import OpSpec
from veomni_core.errors import ContractError, SpecError, did_you_mean
from veomni_ops.catalog import OPS
from veomni_ops.contract import Size, contract_for
from veomni_ops.rank_contract import RankContract


def check_kernel(
    spec: KernelSpec,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    *,
    op: OpSpec | None = None,
    largest: Size | None = None,
    every_form: bool = True,
    part: tuple[int, int] = (0, 1),
    fail_fast: bool = False,
) -> ConformanceReport:
    """Check a kernel against its op's contract.

    Args:
        spec: the kernel.
        device: where it runs.
        dtype: the dtype of the samples, one of ``spec.dtypes``.
        op: the kernel's op; needed if it is not one of the core's.
        largest: the size of the largest samples to run. Without it, :attr:`Size.BEYOND_A_TILE` on a CPU, and all
            samples on any other device.
        every_form: check the situations of training on one sample of each form. False checks them on a single sample,
            for kernels in an interpreter.
        part: ``(index, count)``: only this one of ``count`` parts. Processes that have a part each check everything
            together, and each case is in one report.
        fail_fast: end the check at the first failure, for whoever is mending a kernel. What several ranks call together
            is asked everything.

    Returns:
        The report, with one case per sample. Its ``skipped`` lists what was left out, and its ``seconds`` says what
        took how long.

    Raises:
        SpecError: the spec doesn't declare ``dtype``.
        ContractError: the op or its contract is unknown, or the contract's own samples or reference raise.
        KernelLoadError: the kernel can't be imported.

    Example:
        >>> from veomni_core import KernelSpec
        >>> spec = KernelSpec("mine", "swiglu_mlp", "standard", factory="veomni_ops.swiglu_mlp:standard")
        >>> check_kernel(spec, "cpu", "float32").ok
        True
    """
    if dtype not in spec.dtypes:
        raise SpecError(f"{spec} does not declare {dtype}. {did_you_mean(dtype, spec.dtypes)}")
    op = op or _builtin_op(spec.op_name)
    contract = contract_for(op, spec.variant)
    for what, tolerances in (("values", contract.values), ("gradients", contract.gradients)):
        if dtype not in tolerances:
            raise ContractError(f"the contract of {spec.op_name}/{spec.variant} has no tolerance of {what} in {dtype}")
    device, spent = torch.device(device), TimeSpent()
    if isinstance(contract, RankContract):
        spec.load()  # raises here, rather than in a rank
        cases = () if part[0] else tuple(check_on_ranks(spec, op, device, dtype))
        return ConformanceReport(str(spec), str(device), dtype, cases, seconds=spent.rounded())
    if largest is None:
        largest = Size.BEYOND_A_TILE if device.type == "cpu" else Size.LARGE
    before = ProcessState()
    kernel = spec.load()
    imported = tuple(f"importing it changes {change}" for change in before.changes() if change not in _OF_IMPORTS)
    before.restore()
    subject = Subject(spec, kernel, contract, device, getattr(torch, dtype), spent)
    try:
        with compilers_counted(spent):
            found = _cases(subject, largest, every_form, part, fail_fast)
            cases = tuple(_up_to_a_failure(found) if fail_fast else found)
    finally:
        before.restore()
    if imported:
        cases = (CaseResult("import", imported), *cases)
    sizes = {Size.BEYOND_A_TILE: "samples beyond one tile", Size.LARGE: "large samples"}
    skipped = tuple(words for size, words in sizes.items() if size > largest)
    if not every_form:
        skipped = ("what training does with all but one sample", *skipped)
    if not hypothesis_is_installed():
        skipped = (*skipped, MISSING)
    if fail_fast and any(case.failures for case in cases):
        skipped = ("what follows the first failure", *skipped)
    return ConformanceReport(str(spec), str(device), dtype, cases, skipped, spent.rounded())


# Not reported: libraries add warning filters when they are imported, and draw random numbers. A job's process restores
# the random states then, but not beside another thread, which the process of a check has (see core's random_states).
_OF_IMPORTS = ("the warnings filters", *RANDOM_STATES)
_MOST, _ELEMENTS = 9, 2**17  # inputs of samples beyond a tile that get more questions, and elements


def _up_to_a_failure(cases: Iterator[CaseResult]) -> Iterator[CaseResult]:
    for case in cases:
        yield case
        if case.failures:
            return


def _builtin_op(name: str) -> OpSpec:
    for op in OPS:
        if op.name == name:
            return op
    raise ContractError(f"op {name!r} is not one of the core's: pass check_kernel(..., op=its OpSpec)")


def _cases(
    subject: Subject, largest: Size, every_form: bool, part: tuple[int, int], fail_fast: bool
) -> Iterator[CaseResult]:
    positions = [position for size in Size if size <= largest for position in subject.positions(size)]
    computed = [position for position in positions if not subject.refused(position)]
    alone = None if every_form else _smallest(subject, computed)
    forms: set[object] = set()
    passes, (index, count) = True, part
    if fail_fast:  # by the values of all samples first: the situations of training take most of the time
        for position in computed[index::count]:
            if (case := _guarded(subject, position)).failures:
                yield _described(subject, position, case)

    def is_asked(position: Position) -> bool:
        if alone or position not in computed:
            return position == alone
        return subject.is_asked_more(position) and _form(subject, position) not in forms

    for turn, position in enumerate(positions):
        # What is asked more takes most of the time, so its samples are dealt out by themselves.
        if count > 1 and (len(forms) if is_asked(position) else -turn) % count != index:
            forms.update([_form(subject, position)] if is_asked(position) else [])
            continue
        if position not in computed:
            yield _refusal(subject, position)
            continue
        case = _guarded(subject, position)
        if not case.failures and is_asked(position):
            first = not forms
            forms.add(_form(subject, position))
            # As parameters on the first form, on the second as plain tensors, and so on.
            subject.draws_parameters = len(forms) % 2 == 1
            failures = _uses(subject, position, _neighbour(position, computed), first)
            case = case.with_failures(first_of(failures) if fail_fast else failures)
            subject.draws_parameters = False
        subject.forget(position)
        passes = passes and not case.failures
        yield _described(subject, position, case)
    if subject.spec.backward and computed and not index:
        yield check_second_derivatives(subject, computed[0])
    # A fault that is known already would only be found again, in other words.
    if passes and computed and index == count - 1:
        yield from _of_the_kernel(subject, computed, every_form)


def _of_the_kernel(subject: Subject, computed: list[Position], every_form: bool) -> Iterator[CaseResult]:
    """What is asked once of a kernel that passed every sample."""
    before = ProcessState()
    yield CaseResult("the next batch", tuple(check_other_integers(subject, computed)))
    smallest = _smallest(subject, computed) or computed[0]
    if every_form:
        yield CaseResult("many layers", tuple(check_many_layers(subject, smallest)))
        yield CaseResult("other dtypes", tuple(check_other_dtypes(subject, smallest)))
        wide = [each for each in computed if each.size is Size.BEYOND_A_TILE and not subject.sample(each).values_only]
        found = first_of(sentence for each in wide for sentence in check_batch_invariance(subject, each))
        yield CaseResult("batches beyond a tile", tuple(found))
        yield CaseResult("frozen inputs and layouts beyond a tile", tuple(first_of(_beyond_a_tile(subject, wide))))
    yield CaseResult("custom operators", tuple(check_custom_operators(subject, computed[0])))
    if subject.spec.fullgraph:
        yield CaseResult("compiled", tuple(check_compiled_calls(subject, computed[0])))
    if every_form:
        found = first_of(check_compiled_options(subject, computed))
        yield CaseResult("compiled with options", tuple(found))
    if "dropout" in subject.spec.features:
        yield CaseResult("dropout", tuple(check_dropped_weights(subject)))
    if subject.spec.options and not subject.spec.settings:
        yield CaseResult("options", tuple(check_options(subject, computed)))
    if asks_for_huge_calls(subject):
        yield check_huge_calls(subject, computed)
    found = check_generated_samples(subject, computed, interpreted=not every_form)
    yield CaseResult("generated samples", tuple(found))
    before.restore()


def _beyond_a_tile(subject: Subject, wide: list[Position]) -> Iterator[str]:
    """Further questions about samples beyond a tile: about the one of each form that has the longest dimension."""
    forms: dict[object, list[tuple[int, Position]]] = {}
    for position in wide:
        inputs = subject.inputs(subject.sample(position)).values()
        if len(inputs) <= _MOST and sum(x.numel() for x in inputs) <= _ELEMENTS:
            longest = max((size for x in inputs for size in x.shape), default=0)
            forms.setdefault(_form(subject, position), []).append((longest, position))
    for some in forms.values():
        _, position = max(some, key=itemgetter(0))
        layouts = check_memory_layouts(subject, position, repeated=False)
        for sentence in chain(check_frozen_inputs(subject, position, all_subsets=3), layouts):
            yield f"{sentence}, as sample {subject.sample(position).name!r} shows"
        subject.forget(position)


def _guarded(subject: Subject, position: Position) -> CaseResult:
    before = ProcessState()
    try:
        case = check_values(subject, position)
    except ContractError:
        raise
    except Exception as error:  # whatever a kernel raises on a legal input is a failure of the kernel
        case = CaseResult(subject.sample(position).name, (f"raised {one_line(error)}",))
    # A first call may import libraries. `check_process_state` finds the filters that every call changes.
    changes = [change for change in before.changes() if change not in _OF_IMPORTS]
    before.restore()
    return case.with_failures(f"changes {change} of the process" for change in changes)


def _uses(subject: Subject, position: Position, neighbour: Position, first: bool) -> Iterator[str]:
    questions = (
        check_frozen_inputs,
        check_later_steps,
        check_modes,
        check_autocast,
        check_mixed_dtypes,
        check_gradients_in_use,
        check_memory_layouts,
        check_non_finite,
        check_concurrent_calls,
        check_batch_invariance,
    )
    before = ProcessState()
    asked: Iterator[Callable[[Subject, Position], Iterator[str]]] = chain(
        (partial(check_process_state, other_threads=first),),
        questions,
        (partial(check_calls_in_flight, neighbour=neighbour),),
    )
    for question in asked:
        for sentence in question(subject, position):
            before.restore()
            also = _of_a_plain_call(subject, position)
            before.restore()
            yield f"{sentence}; {also}" if also else sentence
        before.restore()


def _of_a_plain_call(subject: Subject, position: Position) -> str | None:
    """About a call that is in no situation, if it fails too: the situation is not to blame then."""
    for other, words in (
        (True, "on other values of the same shapes"),
        (False, "on the sample, which it computed before"),
    ):
        call = partial(subject.plain_problem, position, other)
        for sentence in reveal(f"and not only there: {words}", call):
            return sentence
    return None


def _described(subject: Subject, position: Position, case: CaseResult) -> CaseResult:
    return replace(case, call=described(subject, subject.sample(position))) if case.failures else case


def _neighbour(position: Position, computed: list[Position]) -> Position:
    """Another small sample, usually of another shape."""
    small = [other for other in computed if other.size is Size.SMALL]
    return small[(small.index(position) + 1) % len(small)]


def _smallest(subject: Subject, positions: list[Position]) -> Position | None:
    """The smallest contiguous sample in which no result and no gradient is all zeros; else the smallest sample."""

    def elements(position: Position) -> tuple[bool, int, int]:
        tensors, results = subject.inputs(subject.sample(position)).values(), subject.exact(position).results
        counts = (sum(x.numel() for x in some) for some in (results, tensors))
        return (any(not x.is_contiguous() for x in tensors), *counts)  # type: ignore[return-value]

    small = sorted((each for each in positions if subject.is_asked_more(each)), key=elements)
    return next((each for each in small if subject.tells(each)), small[0] if small else None)


def _form(subject: Subject, position: Position) -> object:
    sample = subject.sample(position)
    tensors = subject.inputs(sample).items()
    return (
        tuple(value is None for value in sample.args),
        frozenset(sample.kwargs),
        tuple((name, x.dtype, x.dim(), x.requires_grad, x.is_contiguous()) for name, x in tensors),
    )


def _refusal(subject: Subject, position: Position) -> CaseResult:
    """Check that the kernel raises on a sample that it is not declared for, instead of silently ignoring a part."""
    name, why = subject.sample(position).name, subject.refused(position)
    try:
        subject.call(subject.draw(position))
    except Exception:
        return CaseResult(f"{name} (refused)", ())
    return CaseResult(name, (f"{why}, but computes something instead of raising",))
