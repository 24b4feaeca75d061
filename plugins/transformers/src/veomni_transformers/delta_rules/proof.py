"""What a chunked delta rule computes: its values and gradients, compared with the contract's recurrence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from veomni_ops import chunk_gated_delta_rule, kda
from veomni_ops.contract import Contract
from veomni_transformers.proving import probe
from veomni_transformers.proving.branches import Branches
from veomni_transformers.proving.code_reading import Reading, read_function
from veomni_transformers.proving.functions import global_functions, with_globals
from veomni_transformers.proving.matching import Candidate, first_fit, standard_mixer
from veomni_transformers.proving.package_functions import chosen, is_of_a_package, written
from veomni_transformers.proving.proof import Proof

Function = Callable[..., Any]
# Functions that say whether a graph is being captured. A proof runs the code with either answer.
_CAPTURES = ("is_torchdynamo_exporting", "is_torchdynamo_compiling")
_DECAY, _STRONG_DECAY = 0.3, 4.0
_CONTRACTS = {each.op_name: each for module in (chunk_gated_delta_rule, kda) for each in module.CONTRACTS.values()}


def prove(op_name: str, name: str, function: Any, home: str, is_step: bool = False) -> Proof:
    """Whether ``function``, which a module of the modeling file ``home`` calls ``name``, computes the op.

    Args:
        is_step: whether it is the function for single tokens, after a state.
    """
    runs, own = chosen(function, home), written(function)
    if is_of_a_package(own):  # the file has a function to fall back to
        own = getattr(sys.modules.get(home), f"torch_{name}", None)
    if not isinstance(own, FunctionType):
        return Proof(None, f"the model runs {runs}, and {home} has no code of its own to compare", examined=False)
    reading = read_function(own)
    if reading.doubts:
        return Proof(None, reading.doubts[0])
    with probe.seeded():
        return first_fit(
            _candidates(_CONTRACTS[op_name], own, reading, runs, _STEPS if is_step else _CALLS),
            f"{own.__name__} takes none of the op's calls",
        )


def _candidates(
    contract: Contract, function: FunctionType, reading: Reading, runs: str, calls: Iterable[_Call]
) -> Iterator[Candidate]:
    branches = Branches(reading.codes, frozenset(), function, is_helper=True)
    capturing = [name for name, _ in global_functions(function) if name in _CAPTURES]
    forms: list[Function] = [function]
    if capturing:
        forms.append(with_globals(function, dict.fromkeys(capturing, lambda: True)))
    miss = max(_miss(contract, branches, form, call) for form, call in product(forms, calls))
    yield standard_mixer(function.__name__, miss, runs, branches)


@dataclass(frozen=True)
class _Call:
    """One call. A function may refuse an ``optional`` one: its model then never makes such a call."""

    batch: int
    length: int
    heads: tuple[int, int] = (2, 2)
    widths: tuple[int, int] = (8, 8)
    decay: float = _DECAY
    has_state: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    optional: bool = False

    def inputs(self, op_name: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Its random arguments for this op; every floating-point tensor requires gradients."""
        (key_heads, value_heads), (key_width, value_width) = self.heads, self.widths
        tokens = (self.batch, self.length)
        query, value = (
            probe.random(*tokens, heads, width, dtype=self.dtype)
            for heads, width in ((key_heads, key_width), (value_heads, value_width))
        )
        key = probe.random(*tokens, key_heads, key_width, dtype=self.dtype, scale=key_width**-0.5)
        channels = (key_width,) if op_name == "kda" else ()
        g = -probe.random(*tokens, value_heads, *channels, scale=self.decay).abs()
        beta = probe.random(*tokens, value_heads).sigmoid().to(self.dtype)
        states = [probe.random(self.batch, value_heads, key_width, value_width)] if self.has_state else []
        for x in (query, key, value, g, beta, *states):
            x.requires_grad_()
        return (query, key, value, g, beta), {**self.options, **({"initial_state": states[0]} if states else {})}


_NORMED = {"use_qk_l2norm_in_kernel": True}
_BOTH = {**_NORMED, "output_final_state": True}
_CALLS = (
    _Call(2, 70, has_state=True, options=_BOTH),
    _Call(1, 5, widths=(7, 5)),
    _Call(1, 64, options={"output_final_state": True}),
    _Call(2, 1, options=_BOTH),
    _Call(1, 20, decay=_STRONG_DECAY, has_state=True, options=_BOTH),
    _Call(1, 70, has_state=True, options=_BOTH, dtype=torch.bfloat16),
    _Call(1, 9, heads=(1, 2), options=_NORMED, optional=True),
    _Call(1, 21, options={**_BOTH, "chunk_size": 16}, optional=True),
)
_STEPS = (
    _Call(2, 1, has_state=True, options=_BOTH),
    _Call(1, 1, widths=(7, 5), has_state=True, options={"output_final_state": False}),
    _Call(1, 1, decay=_STRONG_DECAY, has_state=True, options={"output_final_state": True}),
    _Call(1, 1, has_state=True, options=_BOTH, dtype=torch.bfloat16),
    _Call(2, 1, options={**_BOTH, "initial_state": None}),
    _Call(1, 1, heads=(1, 2), has_state=True, options=_BOTH, optional=True),
)


def _miss(contract: Contract, branches: Branches, function: Function, call: _Call) -> float:
    args, options = call.inputs(contract.op_name)
    found, error = probe.attempt(partial(branches.run, partial(function, *args, **options)))
    if error:
        return 0.0 if call.optional else float("inf")
    expected = {name: value for name, value in options.items() if name != "chunk_size"}
    wanted = contract.primary(contract.reference(*args, **expected))
    if not isinstance(found, tuple) or len(found) != 2 or (found[1] is None) != (len(wanted) == 1):
        return float("inf")
    pairs = list(zip(contract.primary(found), wanted, strict=True))
    leaves = [x for x in (*args, options.get("initial_state")) if x is not None]
    if call.dtype is torch.float32:
        return max(probe.miss(ours, theirs, leaves) for ours, theirs in pairs)
    shares = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    if any(a.dtype != b.dtype for a, b in pairs):
        return float("inf")
    return 0.0 if max(shares) <= contract.values["bfloat16"].norm else max(shares)
