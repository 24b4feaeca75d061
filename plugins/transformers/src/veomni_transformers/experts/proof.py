"""How experts are proven: their code is read, then run on tiny weights with every kind of routing.

What it gives is compared with the reference in each layout of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_core.descriptions.kernel_spec import EAGER
from veomni_ops.moe_experts import CONTRACTS
from veomni_transformers.experts.selection import implementation, is_of_others, selected_implementation
from veomni_transformers.forwards.expert_layouts import ExpertLayout
from veomni_transformers.forwards.signatures import leading_parameters, why_not_callable
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import Readings, bypassed, guarded_names, unseen_changes
from veomni_transformers.proving.matching import Candidate, first_fit
from veomni_transformers.proving.proof import Proof
from veomni_transformers.proving.reachable_code import own_function

WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_F32 = torch.float32
_Call = tuple[bool, torch.dtype, tuple[Tensor, ...]]  # whether it must run, its dtype, and its inputs
_RUNS_ANYWHERE = "batched_mm"  # of transformers' implementations of experts
_ROUTED, _GROUPED = 3, 1  # how many tensors a call takes: with routing, or only rows already grouped by expert


@dataclass(frozen=True)
class _Run:
    """One run of the module's own code on a tiny ``copy``, in one mode: its inputs, and the output ``found``."""

    copy: nn.Module
    inputs: tuple[Tensor, ...]
    found: Any

    def miss(self, layout: ExpertLayout) -> float:
        """How far ``found`` is from the result of ``layout``'s forward over the contract's reference."""
        forward = layout.forward_with(CONTRACTS[layout.variant].reference)
        wanted, error = probe.attempt(partial(forward, self.copy, *self.inputs))
        if error or not isinstance(self.found, Tensor):
            return float("inf")
        if not self.found.numel():  # without tokens a result may be a constant, which has no gradient
            return probe.largest_miss(self.found, wanted)
        if self.inputs[0].dtype is not _F32:
            return probe.rounded_miss(self.found, wanted)
        leaves = [tensor for tensor in (*self.inputs, *self.copy.parameters()) if tensor.requires_grad]
        return probe.miss(self.found, wanted, leaves)


def prove_experts(module: nn.Module, readings: Readings, layouts: Mapping[str, ExpertLayout]) -> Proof:
    """What the module computes, in which of ``layouts``, or why that is not known."""
    reading = readings.of(module)
    whole = reading.with_children(readings.of(child) for _, child in bypassed(module, reading, WEIGHTS))
    sizes, why_not = _tiny_sizes(module)
    takes = len(leading_parameters(module, _ROUTED))
    why_not = why_not or unseen_changes(module, reading, WEIGHTS) or why_not_callable(module, takes)
    if sizes is None or why_not:
        return Proof(None, why_not)
    with probe.seeded():
        branches = Branches(whole.codes, guarded_names(module, reading, ()), own_function(module))
        copies = {dtype: _copy(module, sizes, dtype) for dtype in (_F32, *probe.LOW_PRECISION)}
        runs, error = _runs(copies, _calls(sizes, takes == _GROUPED), whole.modes, branches)
        if error:
            return Proof(None, error)
        if probe.draws_random_numbers(partial(type(module).forward, copies[_F32].train(), *runs[0].inputs)):
            return Proof(None, "it draws random numbers in training mode")
        if not all(isinstance(run.found, Tensor) for run in runs):
            return Proof(None, f"gives a {type(runs[0].found).__name__}, expected a tensor")
        proof = first_fit(_candidates(runs, branches, layouts), "its weights and its call fit no known layout")
        if proof.variant is None or implementation(module) is None:
            return proof
        why = _why_not_as_its_class(module, layouts[proof.detail["layout"]], whole.modes, branches)
        name, others = selected_implementation(module), ", registered by other code" if is_of_others(module) else ""
        return Proof(None, f"its config selects {name!r}{others}, {why}") if why else proof


def _why_not_as_its_class(module: nn.Module, layout: ExpertLayout, modes: Iterable[bool], branches: Branches) -> str:
    """How the implementation that runs in ``module`` differs from the code of its class, which is proven; or empty.

    transformers' own may need a GPU. For one that raises here runs another, which calls the same methods of the module;
    if that raises too, as where the engine shards the module, transformers' is taken for what it says it is.
    """
    sizes, _ = _tiny_sizes(module, aligned=True)
    assert sizes is not None, "the code of the class was run"
    name, of_others = selected_implementation(module), is_of_others(module)
    grouped = len(leading_parameters(module, _ROUTED)) == _GROUPED
    calls = [*_calls(sizes, grouped)]
    if not of_others:  # transformers tests these; what they call of the module is in every call
        calls = [call for call in calls if call[0] and call[1] is _F32]
    elif not grouped:  # an index that stands for no expert is met on ranks that share the experts alone
        calls = [call for call in calls if (call[2][1] < sizes.gate_up_experts).all()]
    for each in (name,) if of_others else (name, _RUNS_ANYWHERE):
        copies = {dtype: _copy(module, sizes, dtype, each) for dtype in (_F32, *probe.LOW_PRECISION)}
        runs, error = _runs(copies, calls, modes, branches)
        if not error:
            break
    else:
        return error if of_others else ""
    miss = max(run.miss(layout) for run in runs)
    return f"which is off by {miss:.2%} from the code of its class" if miss else ""


def _runs(
    copies: Mapping[torch.dtype, nn.Module], calls: Iterable[_Call], modes: Iterable[bool], branches: Branches
) -> tuple[list[_Run], str]:
    """Each call of each copy's own forward in each mode, and the error of one that must run; empty if none failed."""
    runs = []
    for must_run, dtype, inputs in calls:
        for training in modes:
            duplicate = copies[dtype].train(training)
            forward = partial(type(duplicate).forward, duplicate, *inputs)
            found, error = probe.attempt(partial(branches.run, forward))
            if error and must_run:
                return [], error
            if not error:
                runs.append(_Run(duplicate, inputs, found))
    return runs, ""


def _candidates(runs: list[_Run], branches: Branches, layouts: Mapping[str, ExpertLayout]) -> Iterator[Candidate]:
    for name, layout in layouts.items():
        evidence = f"{name}: its own code gave the reference's values and gradients, router included"
        proof = Proof(layout.variant, evidence, {"layout": name})
        yield Candidate(f"{layout.variant} {name}", max(run.miss(layout) for run in runs), proof, branches)


@dataclass(frozen=True)
class _TinySizes:
    """The sizes of a tiny copy's weights; ``of`` maps each real size to the tiny one."""

    gate_up_experts: int
    down_experts: int
    hidden: int
    intermediate: int
    transposed: bool
    of: dict[int, int]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tiny shape of the parameter of that name."""
        gate_up, down = (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)
        shapes = {
            "gate_up_proj": (self.gate_up_experts, *(gate_up[::-1] if self.transposed else gate_up)),
            "down_proj": (self.down_experts, *(down[::-1] if self.transposed else down)),
            "gate_up_proj_bias": (self.gate_up_experts, 2 * self.intermediate),
            "down_proj_bias": (self.down_experts, self.hidden),
        }
        return shapes[name]


def _tiny_sizes(module: nn.Module, aligned: bool = False) -> tuple[_TinySizes | None, str]:
    """The sizes, or ``None`` and why the module's tensors are not those of gated experts.

    Grouped products need ``aligned`` ones; the other ones are what they would not divide.
    """
    tensors = {name: value.shape for name, value in module._parameters.items() if value is not None}
    further = [name for name in (*tensors, *module._buffers) if name not in WEIGHTS]
    if further:
        return None, f"has further tensors: {', '.join(further)}"
    gate_up, down = tensors["gate_up_proj"], tensors["down_proj"]
    as_stored = gate_up[1:] == (2 * down[2], down[1])
    if not as_stored and gate_up[1:] != (down[2], 2 * down[1]):
        return None, f"weights of shapes {tuple(gate_up)} and {tuple(down)} are not gated experts, transposed or not"
    hidden, intermediate = down[1:] if as_stored else down[:0:-1]
    (tiny_intermediate, other), experts = (16, 24) if aligned else (10, 6), 4
    # Real sizes that are equal get equal tiny sizes. LongCat has more experts in gate_up than in down; so has its copy.
    tiny_hidden = {intermediate: tiny_intermediate, 2 * intermediate: 2 * tiny_intermediate}.get(hidden, other)
    gate_up_experts = experts if gate_up[0] <= down[0] else experts + 2
    of = {gate_up[0]: gate_up_experts, down[0]: experts, intermediate: tiny_intermediate, hidden: tiny_hidden}
    return _TinySizes(gate_up_experts, experts, tiny_hidden, tiny_intermediate, not as_stored, of), ""


def _copy(module: nn.Module, sizes: _TinySizes, dtype: torch.dtype, implementation: str = EAGER) -> nn.Module:
    """A copy of the module with tiny random weights; its children are copied at full size."""
    duplicate: Any = probe.bare_copy(module)
    for name, child in module._modules.items():
        duplicate._modules[name] = None if child is None else probe.full_copy(child)
    probe.resize_attributes(duplicate, sizes.of)
    if "config" in vars(duplicate):
        duplicate.config = copy.copy(module.config)
        duplicate.config._experts_implementation = implementation
    for name, value in module._parameters.items():
        if value is not None:
            duplicate._parameters[name] = probe.random(*sizes.shape(name), dtype=dtype).requires_grad_()
    return duplicate


def _calls(sizes: _TinySizes, grouped: bool) -> Iterator[_Call]:
    """``(must_run, dtype, inputs)`` of each call: every kind of routing, and small and large values.

    A module that raises in a call that ``must_run`` is refused; other calls are then left out. The routing has experts
    without tokens, with all tokens, one expert twice for a token, an index that stands for no expert, and weights above
    one and below zero. Scales in float16 are small: it ends at 65504, which products inside an expert soon reach.
    """
    experts, hidden = sizes.gate_up_experts, sizes.hidden

    def rows(count: int, scale: float, dtype: torch.dtype) -> Tensor:
        return probe.random(count, hidden, dtype=dtype, scale=scale).requires_grad_()

    if grouped:
        for count, scale in ((3, 1.0), (3, 100.0), (3, 1e6), (1, 1.0), (80, 1.0), (3, 0.0)):
            yield count == 3, _F32, (rows(count * experts, scale, _F32),)
        for dtype in probe.LOW_PRECISION:
            yield True, dtype, (rows(3 * experts, 1.0, dtype),)
        return

    def call(
        index: Tensor, scale: float = 1.0, dtype: torch.dtype = _F32, times: float = 1.0, shift: float = 0.0
    ) -> Any:
        uniform = torch.rand(index.shape, generator=probe.generator()) * times + shift
        return rows(len(index), scale, dtype), index, uniform.to(dtype).requires_grad_()

    def distinct(tokens: int, k: int = 2) -> Tensor:
        return torch.rand(tokens, experts, generator=probe.generator()).argsort(dim=-1)[:, :k]

    for scale in probe.SCALES:
        yield True, _F32, call(distinct(9), scale)
    yield True, _F32, call(distinct(9), times=4.0)
    yield True, _F32, call(distinct(9), shift=-0.5)
    for dtype, scales in zip(probe.LOW_PRECISION, ((1.0, 30.0), (0.1, 1.0)), strict=True):
        for scale in scales:
            yield True, dtype, call(distinct(9), scale, dtype)
    yield False, _F32, call(distinct(9), 0.0)
    yield False, _F32, call(distinct(9, k=1))
    yield False, _F32, call(distinct(9, k=3))
    yield False, _F32, call(distinct(1))
    yield False, _F32, call(distinct(200))
    yield False, _F32, call(torch.tensor([[0, 1]]).repeat(300, 1))
    yield False, _F32, call(torch.full((40, 1), 0))
    yield False, _F32, call(torch.full((5, 2), 1))
    yield False, _F32, call(torch.where(distinct(12) == 0, experts, distinct(12)))  # an index that stands for no expert
    yield False, _F32, call(distinct(0))
