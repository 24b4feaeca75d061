"""What a rotary function computes: its values, gradients and bfloat16 results, compared with each contract's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from veomni_ops import rotary_pos_emb, rotary_pos_emb_vision
from veomni_ops.contract import Contract, as_tensors
from veomni_ops.rotation import AngleLayout
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import read_function
from veomni_transformers.proving.hollow_twin import BATCH, LENGTH
from veomni_transformers.proving.matching import if_every_branch_ran
from veomni_transformers.proving.proof import Proof, ProvenOnce
from veomni_transformers.rotary.arguments import (
    COMPLEX,
    COMPLEX_PATCHES,
    UNBATCHED,
    as_in_contracts,
    form_of,
    of_contract,
)
from veomni_transformers.rotary.trace import Call

_CONTRACTS = (*rotary_pos_emb.CONTRACTS.values(), *rotary_pos_emb_vision.CONTRACTS.values())
_UNSQUEEZED = (1, 2)
_UNSEEN = "no rotary embedding near it could be run to see its cos and sin"
Function = Callable[..., Any]


@dataclass(frozen=True)
class _Tried:
    """What one call showed of its function; ``runs`` is whether the function ran without an error.

    An attention is tried with every result of the rotary embeddings near it, and only some of them fit its function.
    """

    proof: Proof
    runs: bool = True


class RotaryProofs:
    """Proofs of functions, each function proven once; to be used within :func:`probe.seeded`."""

    def __init__(self) -> None:
        self._tried: ProvenOnce[_Tried] = ProvenOnce()

    def of(self, function: Function, calls: Sequence[Call]) -> Proof:
        """Combines the proofs of the ``calls`` that ran; refuses if one of them is refused or if they disagree."""
        tried = [self._tried.of((function, call.form), partial(_try, function, call)) for call in calls]
        proofs = [each.proof for each in tried if each.runs] or [each.proof for each in tried]
        refused = next((proof for proof in proofs if proof.variant is None), None)
        if refused is not None:
            return refused
        variants = {proof.variant for proof in proofs if proof.variant is not None}
        if len(variants) > 1:
            return Proof(None, f"its calls are of several variants: {', '.join(sorted(variants))}")
        return proofs[0]


def _try(function: Function, call: Call) -> _Tried:
    form = form_of(call.args, call.kwargs)
    args, kwargs = as_in_contracts(form, call.args, call.kwargs)
    call = replace(call, args=args, kwargs=kwargs)
    contracts = [contract for contract in _CONTRACTS if _fits(contract, call)]
    if not contracts:
        return _Tried(Proof(None, f"{call.name} is called with {call.described}, which no variant takes"))
    inputs = _random_like(call, AngleLayout.UNRELATED)
    with probe.own_numbers():
        _, error = probe.attempt(lambda: of_contract(function, form)(*inputs, **call.kwargs))
    if error:
        unseen = not call.handed_over and not form and contracts[0].op_name == "rotary_pos_emb"
        return _Tried(Proof(None, f"{call.name}: {_UNSEEN if unseen else error}", examined=False), runs=False)
    proof = _prove(function, form, call, contracts)
    return _Tried(replace(proof, detail={"angles": form}) if form else proof)


def _prove(function: Function, form: str, call: Call, contracts: Sequence[Contract]) -> Proof:
    """The proof of the first of ``contracts`` that the function fulfils. ``call`` is known to run without an error."""
    reading = read_function(function)
    if reading.doubts:
        return Proof(None, reading.doubts[0])
    tried = []
    # First with cos and sin of no layout, to see which entries the function reads; then with those of the model.
    for layout in (AngleLayout.UNRELATED, *_repeating(call, form, contracts[0])):
        for contract in contracts:
            branches = Branches(reading.codes, frozenset(), inspect.unwrap(function), is_helper=True)  # type: ignore[arg-type]
            watched = partial(branches.run_call, of_contract(function, form))
            variations = ((each, _random_like(each, layout, scale)) for each, scale in _variations(call, form))
            why_not = next(filter(None, (_mismatch(watched, contract, *each) for each in variations)), "")
            if not why_not:
                proof = _with_angles(watched, contract, call, layout, form)
                return if_every_branch_ran(proof, f"{call.name} is {contract.variant}", branches)
            tried.append(f"not {contract.variant}: {why_not}")
    return Proof(None, f"{call.name} is {'; '.join(tried[: len(contracts)])}")


def _variations(call: Call, form: str) -> Iterator[tuple[Call, float]]:
    """``(call, scale)``: the call itself, large values, a batch of one, one position, and 70 positions."""
    yield call, 1.0
    yield call, 1e4
    for batch, length in ((1, LENGTH), *([] if form == UNBATCHED else [(BATCH, 1)]), (1, 70)):
        if all(LENGTH in value.shape for value in call.args if isinstance(value, Tensor)):
            args = tuple(_resized(value, batch, length) for value in call.args)
            yield replace(call, args=args), 1.0


def _resized(value: Any, batch: int, length: int) -> Any:
    """Zeros of the same dtype for another batch and length, in place of the dimensions of sizes BATCH and LENGTH."""
    if not isinstance(value, Tensor):
        return value
    first, *others = value.shape
    shape = [batch if first == BATCH and value.dim() > 2 else first, *others]
    return torch.zeros([length if size == LENGTH else size for size in shape], dtype=value.dtype)


def _repeating(call: Call, form: str, contract: Contract) -> tuple[AngleLayout, ...]:
    """The layouts in which the model's ``cos`` and ``sin`` repeat entries.

    Functions that read different copies of an entry give the same there: DeepSeek-V3's reads both halves up to
    transformers 5.16, and one half since.
    """
    if form in (COMPLEX, COMPLEX_PATCHES):
        return (AngleLayout.NEIGHBOURS,)
    # Where a text's are not known, a function that needs one of these is not refused for what it computes.
    known = call.handed_over or contract.op_name == "rotary_pos_emb"
    layouts = (AngleLayout.HALVES, AngleLayout.NEIGHBOURS) if known else ()
    return tuple(layout for layout in layouts if all(layout.holds(angles) for angles in call.angles))


def _fits(contract: Contract, call: Call) -> bool:
    try:
        given = inspect.signature(contract.reference).bind(*call.args, **call.kwargs).arguments
    except TypeError:
        return False
    inserted = given.pop("unsqueeze_dim", 1)
    if not all(isinstance(value, Tensor) and value.is_floating_point() for value in given.values()):
        return False
    *rotated, cos, _ = (value.dim() for value in given.values())
    if contract.op_name == "rotary_pos_emb_vision":
        return bool(max(rotated) > cos)
    return bool(max(rotated) == 4 and cos == 3 and isinstance(inserted, int) and inserted in _UNSQUEEZED)


def _random_like(call: Call, layout: AngleLayout, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Random inputs of the call's shapes, with ``cos`` and ``sin`` in ``layout``; they need not be of real angles."""
    rotated = [probe.random(*value.shape, scale=scale).requires_grad_() for value in call.args[:-2]]
    angles = [probe.random(*value.shape) for value in call.args[-2:]]
    if layout is not AngleLayout.UNRELATED:
        angles = [layout.spread(values[..., : values.shape[-1] // 2]) for values in angles]
    return (*rotated, *angles)


def _mismatch(function: Function, contract: Contract, call: Call, inputs: tuple[Tensor, ...]) -> str:
    wanted, error = probe.attempt(lambda: contract.reference(*inputs, **call.kwargs))
    if error:
        return "the reference does not take its shapes"
    found = function(*inputs, **call.kwargs)
    if isinstance(found, tuple) != isinstance(wanted, tuple) or len(as_tensors(found)) != len(as_tensors(wanted)):
        return "it returns another number of tensors"
    for name, got, want, source in zip("qk", as_tensors(found), as_tensors(wanted), inputs, strict=False):
        if not probe.close(got, want):
            return f"{name} misses by {probe.largest_miss(got, want):.1%}"
        if not got.requires_grad or not probe.gradients_close(got, want, (source,)):
            return f"the gradient of {name} differs"
    return _mismatch_in_bfloat16(function, contract, call, inputs)


def _mismatch_in_bfloat16(function: Function, contract: Contract, call: Call, wide: tuple[Tensor, ...]) -> str:
    """What differs in bfloat16, with ``cos`` and ``sin`` in the dtypes of the traced call."""
    inputs = tuple(value.detach().to(given.dtype) for value, given in zip(wide, call.args, strict=True))
    exact = as_tensors(contract.reference(*(value.double() for value in inputs), **call.kwargs))
    found, error = probe.attempt(lambda: as_tensors(function(*inputs, **call.kwargs)))
    if error:
        return f"in bfloat16 {error}"
    for name, got, want in zip("qk", found, exact, strict=False):
        if got.dtype != call.args[0].dtype:
            return f"{name} is {got.dtype} for {call.args[0].dtype} inputs"
        # Compared in norm: the rounding of single elements depends on how large the random cosines happen to be.
        miss = float((got.double() - want).norm() / want.norm())
        if miss > contract.values["bfloat16"].norm:
            return f"{name} misses by {miss:.1%} in bfloat16"
    return ""


def _with_angles(function: Function, contract: Contract, call: Call, probed: AngleLayout, form: str) -> Proof:
    """The proof of ``contract``, if the model's ``cos`` and ``sin`` have its layout; it was matched on ``probed``."""
    layout = rotary_pos_emb.LAYOUTS.get(contract.variant, AngleLayout.UNRELATED)
    problem = ""
    if form in (COMPLEX, COMPLEX_PATCHES):
        layout = AngleLayout.NEIGHBOURS
    elif not call.handed_over and contract.op_name == "rotary_pos_emb":
        return Proof(None, f"{call.name}: {_UNSEEN}", examined=False)
    elif not call.handed_over:
        problem = _doubt(function, call)
    elif not all(layout.holds(angles) for angles in call.angles):
        problem = f"its cos and sin don't have {layout.value}"
    if problem:
        return Proof(None, f"{call.name} is {contract.variant}, but {problem}")
    seen = layout if probed is AngleLayout.UNRELATED else probed
    evidence = f"{call.name} gave the reference's values and gradients; its cos and sin have {seen.value}"
    return Proof(contract.variant, evidence, op_name=contract.op_name)


def _doubt(function: Function, call: Call) -> str:
    """Why ``cos`` and ``sin`` might be narrower than the head, where no embedding's result shows their width.

    Empty if the function fails on narrower ones, so that they can't be.
    """
    *rotated, cos, sin = _random_like(call, AngleLayout.UNRELATED)
    narrow = cos.shape[-1] // 2
    with probe.own_numbers():
        _, error = probe.attempt(lambda: function(*rotated, cos[..., :narrow], sin[..., :narrow], **call.kwargs))
    return "" if error else "it takes narrower cos and sin too, and how wide the model's are isn't known"
