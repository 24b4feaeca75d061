"""How a gated MLP is proven: its code is read, then run over tiny linears in each dtype and mode.

What it gives is compared with the reference of each variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from veomni_ops.contract import Contract
from veomni_transformers.forwards.gated_mlps import Layout, over_linears
from veomni_transformers.forwards.signatures import why_not_callable
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import Readings, bypassed, guarded_names, unseen_changes
from veomni_transformers.proving.matching import Candidate, first_fit
from veomni_transformers.proving.proof import Proof
from veomni_transformers.proving.reachable_code import own_function

_HIDDEN, _INTERMEDIATE = 8, 12
_F32 = torch.float32
# (leading dimensions, dtype, scale) of the inputs. Scales in float16 stay small: it ends at 65504, which the product of
# two projections soon reaches.
_CASES = (
    *(((2, 3), _F32, scale) for scale in probe.SCALES),
    *((leading, _F32, 1.0) for leading in ((5,), (1,), (1, 4), (4, 1), (1, 1), (67,), (2, 9), (2, 3, 2))),
    ((2, 3), _F32, 0.0),
    *((leading, torch.bfloat16, scale) for leading in ((2, 3), (1, 9)) for scale in (1.0, 30.0, 1e6)),
    *((leading, torch.float16, scale) for leading in ((2, 3), (1, 9)) for scale in (1.0, 10.0, 30.0)),
)


@dataclass(frozen=True)
class _Run:
    """One run of the module's own code on a tiny ``copy``, in one mode: the input ``x`` and the output ``found``."""

    copy: nn.Module
    x: Tensor
    found: Any


def prove_mlp(
    module: nn.Module,
    readings: Readings,
    linears: dict[str, Any],
    layouts: list[Layout],
    contracts: Mapping[str, Contract],
) -> Proof | None:
    """What the module computes, or why that could not be proven.

    Returns ``None`` if the module is probably attention: its linears (queries, keys, values) are all square, and its
    forward can't be proven or fails when it is run alone.
    """
    reading = readings.of(module)
    whole = reading.with_children(readings.of(child) for _, child in bypassed(module, reading, linears))
    with probe.seeded():
        why_not = unseen_changes(module, reading, linears) or why_not_callable(module, proven=1)
        is_square = all(child.in_features == child.out_features for child in linears.values())
        if why_not:
            return None if is_square else Proof(None, why_not)
        branches = Branches(whole.codes, guarded_names(module, reading, linears), own_function(module))
        copies = {dtype: _copy(module, linears, layouts[0], dtype) for dtype in (_F32, *probe.LOW_PRECISION)}
        runs = []
        for leading, dtype, scale in _CASES:
            for training in whole.modes:
                x = probe.random(*leading, _HIDDEN, dtype=dtype, scale=scale).requires_grad_()
                copy = copies[dtype].train(training)
                found, error = probe.attempt(partial(branches.run, partial(type(module).forward, copy, x)))
                if error and len(leading) == 2:  # hidden states [B, S, H] must run; other shapes need not
                    first = _first_called(copy, linears, x)
                    if first and not any(first in layout[:-1] for layout in layouts):
                        error = f"its forward calls {first} first, which is as wide as a down projection"
                        return Proof(None, error)
                    return None if is_square else Proof(None, error, examined=False)
                if not error:
                    runs.append(_Run(copy, x, found))
        if probe.draws_random_numbers(partial(type(module).forward, copies[_F32].train(), runs[0].x)):
            return Proof(None, "it draws random numbers in training mode")
        return first_fit(_candidates(runs, layouts, contracts, branches), "its linears fit no variant")


def _copy(module: nn.Module, linears: dict[str, Any], layout: Layout, dtype: torch.dtype) -> nn.Module:
    """A copy of the module with tiny random linears; its other children are copied at full size."""
    duplicate = probe.bare_copy(module)
    shapes = _tiny_shapes(linears, layout)
    for name, child in module._modules.items():
        if name in shapes:
            inputs_width, outputs_width = shapes[name]
            bias = getattr(child, "bias", None) is not None
            duplicate._modules[name] = probe.tiny_linear(inputs_width, outputs_width, bias).to(dtype)
        else:
            duplicate._modules[name] = None if child is None else probe.full_copy(child)
    return duplicate


def _first_called(copy: nn.Module, linears: Iterable[str], x: Tensor) -> str:
    """Which linear ``copy`` calls first; empty if none. The copy keeps the hooks that see it."""
    called: list[str] = []
    for name in linears:
        copy._modules[name].register_forward_pre_hook(lambda *_, name=name: called.append(name))  # type: ignore[union-attr, misc]
    probe.attempt(partial(type(copy).forward, copy, x))
    return called[0] if called else ""


def _tiny_shapes(linears: dict[str, Any], layout: Layout) -> dict[str, tuple[int, int]]:
    *first, down = layout
    is_square = linears[down].in_features == linears[down].out_features
    inner = _HIDDEN if is_square else _INTERMEDIATE
    packed = 2 if len(first) == 1 else 1
    return {**dict.fromkeys(first, (_HIDDEN, packed * inner)), down: (inner, _HIDDEN)}


def _candidates(
    runs: list[_Run], layouts: list[Layout], contracts: Mapping[str, Contract], branches: Branches
) -> Iterator[Candidate]:
    evidence = "its own code gave the reference's values and gradients"
    for variant, contract in contracts.items():
        for layout in layouts:
            miss = _largest_miss(runs, over_linears(contract.reference, layout))
            yield Candidate(variant, miss, Proof(variant, evidence, {"layout": list(layout)}), branches)


def _largest_miss(runs: list[_Run], bound: Callable[..., Tensor]) -> float:
    largest = 0.0
    for run in runs:
        wanted, error = probe.attempt(partial(bound, run.copy, run.x))
        if error or not isinstance(run.found, Tensor):  # the real shapes allow this layout, the tiny ones don't
            return float("inf")
        if run.x.dtype is _F32:
            miss = probe.miss(run.found, wanted, (run.x, *run.copy.parameters()))
        else:
            miss = probe.rounded_miss(run.found, wanted)
        largest = max(largest, miss)
    return largest
